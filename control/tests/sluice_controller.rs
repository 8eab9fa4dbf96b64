//! `sluice-controller` as its user sees it: exit codes and output.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead as _, Read, Write};
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn sluice_controller(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sluice-controller")).args(arguments).output().unwrap()
}

fn check(text: &str) -> Output {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    sluice_controller(&["check", "--config", file.path().to_str().unwrap()])
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_good_configuration_is_printed_in_full_and_can_be_read_again() {
    let output = check("pools: [{name: default, addresses: [192.0.2.100-192.0.2.199]}]\n");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let effective = text(&output.stdout);
    assert!(effective.contains("loadBalancerClass"), "{effective}");
    let again = check(effective);
    assert_eq!((again.status.code(), text(&again.stdout)), (Some(0), effective));
}

#[test]
fn all_mistakes_are_reported_at_once_with_exit_code_2() {
    let output = check("group: [1]\nnonsense: 1\n");
    assert_eq!(output.status.code(), Some(2));
    let errors = text(&output.stderr);
    assert!(errors.contains("group") && errors.contains("nonsense"), "{errors}");
}

#[test]
fn wrong_usage_ends_with_exit_code_2() {
    assert_eq!(sluice_controller(&["fly"]).status.code(), Some(2));
    assert_eq!(sluice_controller(&["check", "--config"]).status.code(), Some(2));
    assert_eq!(sluice_controller(&["check", "--config", "/nonexistent"]).status.code(), Some(2));
}

#[test]
fn the_definitions_are_printed_with_and_without_a_configuration() {
    let all = [&["crds"][..], &["crds", "--config", "/nonexistent"]].map(sluice_controller);
    for output in &all {
        assert!(output.status.success() && text(&output.stdout).contains("CustomResourceDefinition"));
    }
    assert_eq!(all[0].stdout, all[1].stdout);
}

#[test]
fn a_full_or_closed_standard_output_is_reported_with_exit_code_1() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for arguments in [&["crds"][..], &["check", "--config", file.path().to_str().unwrap()]] {
        let (_, closed) = std::io::pipe().unwrap();
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        for stdout in [std::process::Stdio::from(full), closed.into()] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-controller"));
            let child = command.args(arguments).stdout(stdout).stderr(std::process::Stdio::piped()).spawn().unwrap();
            let output = child.wait_with_output().unwrap();
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{error}");
            // `check` first notes what it has not looked at.
            let error =
                error.strip_prefix("note: kubernetes.kubeconfig: ").map_or(error, |note| note.split_once('\n').unwrap().1);
            assert!(error.starts_with("sluice-controller: cannot write the output: "), "{error}");
        }
    }
}

#[test]
fn unreadable_certificates_are_reported_with_exit_code_2() {
    let manifests = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("controller.yaml");
    let lines = "listen: ['unix:config.sock', '127.0.0.1:9']\nadmin: {listen: 'unix:admin.sock'}\nstatusDir: status\n\
                 tls: {ca: ca.pem, cert: cert.pem, key: key.pem}\n";
    std::fs::write(&config, format!("{lines}manifests: {}\n", manifests.path().display())).unwrap();
    let output = sluice_controller(&["run", "--config", config.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("ca.pem"), "{}", text(&output.stderr));
}

/// A configuration with a source: a kubeconfig that does not exist, or a directory of manifests.
fn run(source: &str) -> (tempfile::TempDir, std::process::Child) {
    run_with(source, &[])
}

/// The same with more variables in its environment.
fn run_with(source: &str, environment: &[(&str, &str)]) -> (tempfile::TempDir, std::process::Child) {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("controller.yaml");
    let socket = directory.path().join("config.sock");
    let status = directory.path().join("status");
    let text = format!(
        "listen: \"unix:{0}\"\nadmin: {{listen: \"unix:{0}.admin\"}}\nstatusDir: {1}\n{source}\n",
        socket.display(),
        status.display()
    );
    std::fs::write(&config, text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-controller"));
    command.args(["run", "--config", config.to_str().unwrap()]).stderr(std::process::Stdio::piped());
    command.envs(environment.iter().copied());
    (directory, command.spawn().unwrap())
}

/// The lines that a program writes to stderr, which is the journal's stream or not.
fn lines_at(command: &mut Command, is_journal: bool, until: &str) -> Vec<String> {
    let (reader, writer) = std::io::pipe().unwrap();
    let of_pipe = std::fs::File::from(std::os::fd::OwnedFd::from(reader.try_clone().unwrap())).metadata().unwrap();
    let stream = format!("{}:{}", of_pipe.dev(), of_pipe.ino() + u64::from(!is_journal));
    let mut child = command.env("JOURNAL_STREAM", stream).stderr(writer).spawn().unwrap();
    // The command holds the other end of the pipe.
    command.stderr(std::process::Stdio::null());
    let mut lines = Vec::new();
    for line in std::io::BufReader::new(reader).lines().map(Result::unwrap).take(1000) {
        let is_last = line.contains(until);
        lines.push(line);
        if is_last {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    lines
}

#[test]
fn lines_in_the_journal_have_the_priority_of_their_level() {
    let (manifests, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(manifests.path().join("broken.yaml"), "kind: [").unwrap();
    let config = directory.path().join("controller.yaml");
    let lines = "listen: 'unix:config.sock'\nadmin: {listen: 'unix:admin.sock'}\nstatusDir: status\n";
    std::fs::write(&config, format!("{lines}manifests: {}\n", manifests.path().display())).unwrap();
    for is_journal in [true, false] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-controller"));
        command.args(["run", "--config", config.to_str().unwrap()]).env("RUST_LOG", "debug").current_dir(directory.path());
        let lines = lines_at(&mut command, is_journal, "broken.yaml");
        let priority = |line: &str| match line {
            _ if line.contains(" ERROR ") => "<3>",
            _ if line.contains(" WARN ") => "<4>",
            _ if line.contains(" INFO ") => "<6>",
            _ => "<7>",
        };
        assert!(lines.iter().any(|line| line.contains(" WARN ") || line.contains(" ERROR ")), "{lines:?}");
        assert!(lines.iter().all(|line| line.starts_with(priority(line)) == is_journal), "{lines:?}");

        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-controller"));
        command.args(["check", "--config", "/nonexistent"]);
        let lines = lines_at(&mut command, is_journal, "/nonexistent");
        assert!(!lines.is_empty() && lines.iter().all(|line| line.starts_with("<3>") == is_journal), "{lines:?}");
    }
}

/// The first line of an HTTP answer.
fn status_line(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

#[test]
fn a_running_controller_is_alive_and_ready() {
    let manifests = tempfile::tempdir().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        // Another process may take the port before the controller does; then the controller exits.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let source = format!("manifests: {}\nhealth: {{listen: '127.0.0.1:{port}'}}", manifests.path().display());
        let (_directory, mut child) = run(&source);
        while child.try_wait().unwrap().is_none() {
            let answers = ["/livez", "/readyz"].map(|path| status_line(port, path).unwrap_or_default());
            if answers.iter().all(|answer| answer == "HTTP/1.1 200 OK") {
                child.kill().unwrap();
                child.wait().unwrap();
                return;
            }
            assert!(Instant::now() < end, "{answers:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(Instant::now() < end, "it ends");
    }
}

#[test]
fn systemd_hears_that_a_controller_is_ready_works_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify.sock");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let environment = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "400000")];
    let (_directory, mut child) = run_with(&format!("manifests: {}", dir.path().display()), &environment);
    let wait_for = |expected: &str| {
        let mut message = [0; 4096];
        loop {
            let length = socket.recv(&mut message).unwrap();
            let message = text(&message[..length]);
            if message.lines().any(|line| line == expected) {
                return message.to_owned();
            }
        }
    };
    assert!(wait_for("READY=1").contains("STATUS=leads"), "with manifests there is one controller");
    for _ in 0..3 {
        wait_for("WATCHDOG=1");
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    wait_for("STOPPING=1");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_missing_kubeconfig_is_reported_with_exit_code_2() {
    let (_directory, child) = run("kubernetes: {kubeconfig: /nonexistent/kubeconfig}");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("/nonexistent/kubeconfig"), "{}", text(&output.stderr));
}

#[test]
fn a_command_that_finds_no_api_server_names_it_and_asks_to_be_repeated() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("controller.yaml");
    let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n\
                      clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u, user: {token: t}}]\n";
    std::fs::write(directory.path().join("kubeconfig"), kubeconfig).unwrap();
    std::fs::write(&config, "kubernetes: {kubeconfig: kubeconfig}\n").unwrap();
    for command in ["release", "uninstall"] {
        let output = sluice_controller(&[command, "--dry-run", "--config", config.to_str().unwrap()]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.starts_with("sluice-controller: cannot list namespaces at http://127.0.0.1:1/: "), "{error}");
        assert!(error.ends_with("check its address in the kubeconfig, and that it runs; then repeat the command\n"), "{error}");
    }
}

#[test]
fn a_running_controller_listens_and_exits_cleanly_on_sigterm() {
    let manifests = tempfile::tempdir().unwrap();
    let (directory, mut child) = run(&format!("manifests: {}", manifests.path().display()));
    let socket = directory.path().join("config.sock");
    let end = Instant::now() + Duration::from_secs(30);
    while std::os::unix::net::UnixStream::connect(&socket).is_err() {
        assert!(child.try_wait().unwrap().is_none() && Instant::now() < end, "it does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!socket.exists());
}
