//! `sluicectl`: queries the admin API of a gateway or a controller and prints the answers, for people or for programs.
//!
//! Invariant: the JSON fields are those of DESIGN section 8, in that order, and a program can rely on them.

mod args;
mod capture;
mod client;
mod convert;
mod error;
mod explanation;
mod filter;
mod flows;
mod list;
mod routing;
mod status;
mod top;

use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};
use std::{env, fs};

use nix::unistd::{Uid, User, geteuid};
use proto::v1;

use args::ConvertArguments;
pub use args::{Arguments, Command, ListArguments, Output};
pub use client::ClientError;
use client::{Server, ask};
use convert::convert;
pub use convert::{ConvertError, Input, Product};
pub use error::CtlError;
pub use filter::InvalidFilter;
pub use list::Screen;
use list::follow;
use routing::RoutingDaemon;
pub use routing::RoutingError;

/// The standard input.
const STDIN: &str = "-";

/// How long and how often a gateway is asked for its first state.
const FIRST_STATE_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_STATE_POLL: Duration = Duration::from_millis(200);

/// Runs a command. Results go to `out`, notes for people to `notes`.
///
/// # Errors
/// If the request fails or the output cannot be written.
pub async fn run(arguments: &Arguments, out: &mut impl Write, notes: &mut impl Write, screen: Screen) -> Result<(), CtlError> {
    let Arguments { server, ca, cert, key, command } = arguments;
    let server = &Server::new(server, ca.as_ref(), cert.as_ref(), key.as_ref());
    match command {
        Command::Status(arguments) => status::status(server, arguments, out, notes, screen).await,
        Command::History(arguments) => list::history::print(server, arguments, out).await,
        Command::Services(list) => follow::<v1::ServiceStatus>(server, list, out, notes, screen).await,
        Command::Frontends(list) => follow::<v1::FrontendStatus>(server, list, out, notes, screen).await,
        Command::Backends(list) => follow::<v1::BackendStatus>(server, list, out, notes, screen).await,
        Command::Flows(arguments) => flows::run(server, arguments, out, notes, screen).await,
        Command::Watch(arguments) => capture::watch::print(server, arguments, out, notes).await,
        Command::Explain(arguments) => explanation::print(server, arguments, out).await,
        Command::Capture(arguments) => capture::capture(server, arguments, out, notes, screen).await,
        Command::Trace(arguments) => capture::trace(server, arguments, out, notes).await,
        Command::Ports(list) => follow::<v1::PortStatus>(server, list, out, notes, screen).await,
        Command::Drops(list) => follow::<v1::DropCount>(server, list, out, notes, screen).await,
        Command::Gateways(list) => follow::<v1::GatewayStatus>(server, list, out, notes, screen).await,
        Command::Vips(list) => follow::<v1::VipStatus>(server, list, out, notes, screen).await,
        Command::Pools(list) => follow::<v1::PoolStatus>(server, list, out, notes, screen).await,
        Command::Events(list) => follow::<v1::EventStatus>(server, list, out, notes, screen).await,
        Command::Overrides(list) => follow::<v1::Override>(server, list, out, notes, screen).await,
        Command::Drain { target, wait, timeout } => {
            let request = v1::DrainRequest { target: target.clone(), by: user() };
            let done = ask(server, async |mut admin| admin.drain(request).await).await?;
            // A controller of an older version does not say whether a name is that of a node or of a gateway.
            let target = if done.target.is_empty() { target.clone() } else { done.target.clone() };
            print(done, out, notes)?;
            if *wait { status::drained(server, &target, timeout.as_ref(), out, notes, screen).await } else { Ok(()) }
        }
        Command::Undrain { target } => {
            let request = v1::UndrainRequest { target: target.clone() };
            print(ask(server, async |mut admin| admin.undrain(request).await).await?, out, notes)
        }
        Command::Weight { service, backend, weight } => {
            let (service, backend, weight) = (service.clone(), backend.to_string(), weight.0.map(u32::from));
            let request = v1::SetWeightRequest { service, backend, weight, by: user() };
            print(ask(server, async |mut admin| admin.set_weight(request).await).await?, out, notes)
        }
        Command::Reload => {
            let answer = ask(server, async |mut admin| admin.reload(v1::ReloadRequest {}).await).await?;
            Ok(writeln!(out, "{}", answer.summary)?)
        }
        Command::Config { daemon } => {
            let text = match daemon {
                None => ask_config(server).await?.yaml,
                Some(daemon) => {
                    let text = routing_configuration(server, daemon).await?;
                    if let Some(file) = daemon.checked_file() {
                        return Ok(routing::check(file, &read(file)?, &text)?);
                    }
                    text
                }
            };
            Ok(write!(out, "{text}")?)
        }
        Command::Top(arguments) => top::run(server, arguments).await,
        Command::Convert(arguments) => convert_files(arguments, out, notes),
        Command::Completion { shell } => Ok(args::write_completion(*shell, out)?),
        Command::Man { directory } => args::write_man(directory.as_deref(), out).map_err(|error| match directory.clone() {
            Some(directory) => CtlError::ManPages { directory, error },
            None => CtlError::Output(error),
        }),
        Command::Version => Ok(writeln!(out, "sluicectl {}", env!("CARGO_PKG_VERSION"))?),
    }
}

async fn ask_config(server: &Server) -> Result<v1::GetConfigResponse, ClientError> {
    ask(server, async |mut admin| admin.get_config(v1::GetConfigRequest {}).await).await
}

/// The configuration of a routing daemon. A gateway without a state is asked again for a while: its first one arrives a
/// moment after its start.
async fn routing_configuration(server: &Server, daemon: &RoutingDaemon) -> Result<String, CtlError> {
    let deadline = Instant::now() + FIRST_STATE_TIMEOUT;
    loop {
        match routing::configuration(daemon, ask_config(server).await?) {
            Err(RoutingError::NoState(_)) if Instant::now() < deadline => tokio::time::sleep(FIRST_STATE_POLL).await,
            result => return Ok(result?),
        }
    }
}

/// Prints the result of a change of an override.
fn print(change: v1::ChangeResponse, out: &mut impl Write, notes: &mut impl Write) -> Result<(), CtlError> {
    writeln!(out, "{}", change.summary)?;
    for note in change.notes {
        writeln!(notes, "{note}")?;
    }
    Ok(())
}

/// Reads files and prints pools and notes.
fn convert_files(arguments: &ConvertArguments, out: &mut impl Write, notes: &mut impl Write) -> Result<(), CtlError> {
    let mut texts = Vec::new();
    for file in &arguments.files {
        texts.push((file.display().to_string(), read(file)?));
    }
    if texts.is_empty() {
        texts.push((STDIN.to_owned(), read(Path::new(STDIN))?));
    }
    let inputs: Vec<_> = texts.iter().map(|(name, text)| Input { name, text }).collect();
    let converted = convert(arguments.product, &inputs)?;
    write!(out, "{}", converted.yaml)?;
    for note in converted.notes {
        writeln!(notes, "note: {note}")?;
    }
    Ok(())
}

fn read(file: &Path) -> Result<String, CtlError> {
    let mut text = String::new();
    let result =
        if file.as_os_str() == STDIN { io::stdin().read_to_string(&mut text).map(|_| text) } else { fs::read_to_string(file) };
    result.map_err(|error| CtlError::Input(file.display().to_string(), error))
}

/// Name of the operator, and this machine. The kernel knows the user; variables may have been kept from another one
/// (`su`). Only behind sudo, which sets it for root, a variable has the person.
fn user() -> String {
    let uid = geteuid();
    let behind_sudo = uid.is_root().then(|| env::var("SUDO_USER").ok()).flatten().filter(|name| !name.is_empty());
    let name = behind_sudo.unwrap_or_else(|| name_of(uid));
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{name}@{}", host.trim())
}

/// The name of a user, from the name service of the machine, or else the number.
fn name_of(uid: Uid) -> String {
    match User::from_uid(uid) {
        Ok(Some(user)) => user.name,
        Ok(None) | Err(_) => format!("uid-{uid}"),
    }
}

#[cfg(test)]
mod tests;
