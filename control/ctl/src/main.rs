//! `sluicectl`, the command-line client of a gateway. Exit codes: 0 done, 1 failed, 2 bad usage.

use std::env;
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write as _};
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use ctl::{Arguments, CtlError, Screen, run};
use objects::text::without_os_errors;
use proto::limits::journal;

/// Polling interval of `--watch`, slow enough to read and no load for a gateway.
const PERIOD: Duration = Duration::from_secs(1);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let screen = Screen { redraw: io::stdout().is_terminal(), period: PERIOD };
    match run(&arguments, &mut io::stdout(), &mut io::stderr(), screen).await {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the pipe closed it.
        Err(CtlError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            say(&without_os_errors(&format!("sluicectl: {error}\n")));
            ExitCode::from(error.exit_code())
        }
    }
}

/// Writes an error to stderr, in a unit of systemd with its priority: the gateway's unit reloads by this program.
fn say(error: &str) {
    let mut stderr = io::stderr();
    let of_stderr = stderr.as_fd().try_clone_to_owned().map(File::from).and_then(|file| file.metadata());
    let is_journal = of_stderr.is_ok_and(|file| journal::is_stream(env::var_os(journal::STREAM_VARIABLE).as_deref(), &file));
    let text = if is_journal { journal::with_priority(journal::ERROR, error.as_bytes()) } else { error.into() };
    // Nobody is left to be told.
    let _ = stderr.write_all(&text);
}
