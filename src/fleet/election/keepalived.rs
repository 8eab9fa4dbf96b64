//! keepalived as a child: its configuration, its process, its notifications.
//!
//! It stands for election with one VRRP instance per group. VRRP has to advertise an address: each instance has a
//! link-local one that it gives to `lo`, where nothing hears of it. The engine answers for the VIPs themselves.
//!
//! Invariant: it never outlives sluiced. Its notifications come by a FIFO, in order; after a new start none of an old
//! process are left. Not here: what follows from notifications.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use linux::process::start_bound;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::priority::base;
use crate::agent::persist::directories::create_private;
use crate::settings::Settings;

/// The directory in `stateDir`.
const DIRECTORY: &str = "keepalived";
const PROGRAM: &str = "keepalived";
/// It needs a second to end by itself.
const ENDING_MAX: Duration = Duration::from_secs(3);
/// Longest notification that is read: `INSTANCE "sluice-63" MASTER_RX_LOWER_PRI 254`.
const NOTIFICATION_BYTES_MAX: usize = 256;

/// Why keepalived does not run.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeepalivedError {
    #[error("keepalived cannot be started: {0}; install the package keepalived, or set `announce: {{election: none}}`")]
    Start(#[source] io::Error),
    #[error("{path}: {source}")]
    File { path: String, source: io::Error },
    #[error(
        "keepalived ended ({0}); its messages are in this log at level debug, `keepalived -t -f {1}` checks its configuration"
    )]
    Ended(String, String),
}

/// The state of a group as keepalived sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupState {
    /// This gateway owns it.
    Master,
    /// This gateway owns it, and has heard another one that advertises it with a lower priority.
    MasterHearsOther,
    /// This gateway does not own it.
    Other,
}

/// What keepalived says about a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Notification {
    pub(super) group: u8,
    pub(super) state: GroupState,
}

/// Files of keepalived.
#[derive(Clone, Debug)]
pub(super) struct Files(PathBuf);

impl Files {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self(state_dir.join(DIRECTORY))
    }

    /// Creates the directory and the FIFO of notifications, whose path it returns.
    pub(super) fn create(&self) -> Result<PathBuf, KeepalivedError> {
        let fifo = self.path("notify");
        let created =
            create_private(&self.0).and_then(|()| match mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
                Ok(()) | Err(Errno::EXIST) => Ok(()),
                Err(error) => Err(error.into()),
            });
        created.map_err(|source| KeepalivedError::File { path: fifo.display().to_string(), source })?;
        Ok(fifo)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), KeepalivedError> {
        let path = self.path(name);
        fs::write(&path, text).map_err(|source| KeepalivedError::File { path: path.display().to_string(), source })
    }

    /// Changes the priority of a group; keepalived follows the file.
    pub(super) fn add_to_priority(&self, group: u8, addition: i16) -> Result<(), KeepalivedError> {
        self.write(&format!("group-{group}"), &format!("{addition}\n"))
    }

    /// The configuration.
    fn configuration(&self, settings: &Settings) -> String {
        let election = &settings.election;
        let directory = self.0.display();
        let port = settings.ports.get(election.port);
        let interface = port.map_or("", |port| port.name.as_str());
        let is_v4 = port.is_none_or(|port| port.addresses.iter().any(|net| net.addr().is_ipv4()));
        let mut text = format!(
            "# Written by sluiced at each start.\nglobal_defs {{\n  router_id {}\n  vrrp_version 3\n  notify_fifo \
             \"{directory}/notify\"\n  vrrp_garp_master_delay 0\n  vrrp_garp_master_repeat 1\n}}\n",
            settings.name
        );
        let seconds = election.advertisement.as_secs_f64();
        for group in 0..election.groups {
            let vrid = election.first_vrid + group;
            let address = advertised(is_v4, vrid);
            let _ = write!(
                text,
                "\ntrack_file group-{group} {{\n  file \"{directory}/group-{group}\"\n  weight 1\n}}\n\
                 vrrp_instance sluice-{group} {{\n  state BACKUP\n  interface {interface}\n  virtual_router_id {vrid}\n  \
                 priority {}\n  advert_int {seconds}\n  virtual_ipaddress {{\n    {address}\n  }}\n  track_file {{\n    \
                 group-{group} weight 1\n  }}\n}}\n",
                base(&settings.name, group)
            );
        }
        text
    }
}

/// The address that the instance of a VRID advertises.
fn advertised(is_v4: bool, vrid: u8) -> String {
    if is_v4 {
        format!("{}/32 dev lo scope host", IpAddr::from([169, 254, 83, vrid]))
    } else {
        format!("{}/128 dev lo", IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0x5653, u16::from(vrid)]))
    }
}

/// A running keepalived. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Keepalived {
    child: Child,
    group: Option<Pid>,
    notifications: BufReader<pipe::Receiver>,
    line: Vec<u8>,
    configuration: PathBuf,
}

impl Keepalived {
    /// Starts it. Notifications that an earlier one has left are dropped.
    pub(super) fn start(files: &Files, settings: &Settings) -> Result<Self, KeepalivedError> {
        files.write("keepalived.conf", &files.configuration(settings))?;
        let (configuration, fifo) = (files.path("keepalived.conf"), files.create()?);
        let of_fifo = |source| KeepalivedError::File { path: fifo.display().to_string(), source };
        let receiver = pipe::OpenOptions::new().read_write(true).open_receiver(&fifo).map_err(of_fifo)?;
        let mut rest = [0; 4096];
        loop {
            match receiver.try_read(&mut rest) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(of_fifo(error)),
            }
        }
        let pids = [("--pid", files.path("pid")), ("--vrrp_pid", files.path("vrrp.pid"))];
        let mut command = std::process::Command::new(PROGRAM);
        command.args(["--dont-fork", "--log-console", "--log-detail", "--vrrp", "--use-file"]).arg(&configuration);
        for (option, path) in &pids {
            // An old one may name a process of another program.
            let _ = fs::remove_file(path);
            command.arg(option).arg(path);
        }
        // It must not speak to systemd for this process.
        command.env_remove("NOTIFY_SOCKET");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let runtime = Handle::current();
        let spawn = move |command| {
            let _runtime = runtime.enter();
            Command::from(command).process_group(0).kill_on_drop(true).spawn()
        };
        let mut child = start_bound(command, spawn).map_err(KeepalivedError::Start)?;
        let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) {
            tokio::spawn(log(out));
            tokio::spawn(log(err));
        }
        Ok(Self { child, group, notifications: BufReader::new(receiver), line: Vec::new(), configuration })
    }

    /// The next notification; an error once the process has ended. Cancelling it loses nothing.
    pub(super) async fn next(&mut self) -> Result<Notification, KeepalivedError> {
        loop {
            let read = self.notifications.read_until(b'\n', &mut self.line);
            tokio::select! {
                read = read => if read.is_err() || self.line.len() > NOTIFICATION_BYTES_MAX { self.line.clear() },
                ended = self.child.wait() => {
                    let status = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
                    return Err(KeepalivedError::Ended(status, self.configuration.display().to_string()));
                }
            }
            if self.line.ends_with(b"\n") {
                let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
                tracing::debug!(line = line.trim_end(), "keepalived notifies");
                if let Some(notification) = parse(&line) {
                    return Ok(notification);
                }
            }
        }
    }

    /// Lets it resign, and waits until it has ended.
    pub(super) async fn stop(mut self) {
        if let Some(pid) = self.group {
            let _ = kill_process(pid, Signal::TERM);
        }
        if timeout(ENDING_MAX, self.child.wait()).await.is_ok() {
            self.group = None;
        }
    }
}

impl Drop for Keepalived {
    fn drop(&mut self) {
        // Both of its processes at once: one of them would give the other a second to resign.
        if let Some(group) = self.group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Passes its output on to the log.
async fn log(output: impl AsyncRead + Unpin) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        tracing::debug!(target: "keepalived", "{line}");
    }
}

/// A line such as `INSTANCE "sluice-3" MASTER 150`. `None` for lines that tell of no state of a group.
fn parse(line: &str) -> Option<Notification> {
    let mut words = line.split_whitespace();
    let ("INSTANCE", Some(name), Some(state)) = (words.next()?, words.next(), words.next()) else { return None };
    let group = name.trim_matches('"').strip_prefix("sluice-")?.parse().ok()?;
    let state = match state {
        "MASTER" => GroupState::Master,
        "MASTER_RX_LOWER_PRI" => GroupState::MasterHearsOther,
        "BACKUP" | "FAULT" | "STOP" => GroupState::Other,
        _ => return None,
    };
    Some(Notification { group, state })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::SourceChoice;

    #[test]
    fn notifications_are_parsed() {
        let of = |group, state| Some(Notification { group, state });
        let rows = [
            ("INSTANCE \"sluice-3\" MASTER 150\n", of(3, GroupState::Master)),
            ("INSTANCE \"sluice-0\" BACKUP 100\n", of(0, GroupState::Other)),
            ("INSTANCE \"sluice-15\" FAULT 100\n", of(15, GroupState::Other)),
            ("INSTANCE \"sluice-15\" STOP 100\n", of(15, GroupState::Other)),
            ("INSTANCE \"sluice-1\" MASTER_RX_LOWER_PRI 100\n", of(1, GroupState::MasterHearsOther)),
            ("INSTANCE \"sluice-1\" DELETED 100\n", None),
            ("INSTANCE \"other\" MASTER 100\n", None),
            ("GROUP \"all\" MASTER 100\n", None),
            ("INSTANCE \"sluice-999\" MASTER 100\n", None),
            ("INSTANCE\n", None),
            ("", None),
        ];
        for (line, expected) in rows {
            assert_eq!(parse(line), expected, "{line}");
        }
    }

    #[test]
    fn each_group_is_an_instance_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("sluice.yaml");
        let text = "name: edge-1\nports: [{name: uplink, device: net_tap0, addresses: [192.0.2.2/24]}]\nmanifests: m\n\
                    announce: {election: keepalived, groups: 2, firstVrid: 51, advertisement: 250ms}\n";
        fs::write(&file, text).unwrap();
        let settings = Settings::read(&file, &SourceChoice::File).unwrap();
        let text = Files::new(Path::new("/s")).configuration(&settings);
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        for (group, vrid) in [(0, 51), (1, 52)] {
            let start = lines.iter().position(|line| *line == format!("vrrp_instance sluice-{group} {{")).unwrap();
            let instance = &lines[start..];
            for line in ["interface uplink", "advert_int 0.25", &format!("virtual_router_id {vrid}")] {
                assert!(instance.contains(&line), "{line}: {text}");
            }
            assert!(lines.contains(&format!("169.254.83.{vrid}/32 dev lo scope host").as_str()), "{text}");
        }
        assert!(!text.contains("192.0.2."), "Linux gets no VIP");
        assert_eq!(advertised(false, 51), "fe80::5653:33/128 dev lo");
        assert_eq!(text.matches("vrrp_instance").count(), 2);
    }
}
