//! The Debian package: made of the programs of this build, and installed into an empty root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use edge::{built_program, skip};

const PROGRAMS: [&str; 3] = ["sluiced", "sluice-controller", "sluicectl"];

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", text(&output));
    text(&output)
}

/// The first tool that is missing, with the reason.
fn missing_tool() -> Option<&'static str> {
    let tools = [
        ("cargo-deb", "no `cargo-deb` here (.ci/install package)"),
        ("dpkg-shlibdeps", "no `dpkg-shlibdeps` here (.ci/install package)"),
        ("systemd-sysusers", "no `systemd-sysusers` here (Debian: apt-get install systemd)"),
        ("man", "no `man` here (.ci/install package)"),
    ];
    tools.into_iter().find(|(tool, _)| Command::new(tool).arg("--version").output().is_err()).map(|(_, why)| why)
}

/// The commands that `--help` of a program lists.
fn commands(program: &Path) -> Vec<String> {
    let help = succeed(Command::new(program).arg("--help"));
    let list = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.map(|line| line.split_whitespace().next().unwrap().to_owned()).filter(|name| name != "help").collect()
}

/// Makes the package in `dir`.
fn make_package(dir: &Path) -> PathBuf {
    let programs = dir.join("programs");
    fs::create_dir(&programs).unwrap();
    for (name, package) in PROGRAMS.into_iter().zip(["sluice", "control", "sluicectl"]) {
        let built = built_program(name, package);
        fs::copy(built, programs.join(name)).unwrap();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(".ci/package");
    succeed(Command::new(script).args([&programs, &dir.join("out")]).arg("--fast"));
    let mut made = fs::read_dir(dir.join("out")).unwrap().map(|entry| entry.unwrap().path());
    let (Some(package), None) = (made.next(), made.next()) else { panic!("one package") };
    package
}

/// Installs it into an empty root, as root of nothing else: dependencies are of this machine, so they are not checked.
fn install(package: &Path, root: &Path) {
    for folder in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "etc", "usr/lib/sysusers.d"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    for file in ["var/lib/dpkg/status", "var/lib/dpkg/available", "etc/passwd", "etc/group"] {
        fs::write(root.join(file), "").unwrap();
    }
    let root = format!("--root={}", root.display());
    let options = [root.as_str(), "--force-depends", "--force-script-chrootless", "--install"];
    succeed(Command::new("dpkg").args(options).arg(package));
}

#[test]
fn the_package_installs_into_a_clean_root_with_everything_in_its_place() {
    let test = "the Debian package";
    if let Some(why) = missing_tool() {
        return skip(test, why);
    }
    if !rustix::process::geteuid().is_root() {
        return skip(test, "dpkg needs root");
    }
    let dir = tempfile::tempdir().unwrap();
    let package = make_package(dir.path());
    let control = succeed(Command::new("dpkg-deb").arg("--field").arg(&package));
    for field in ["Package: sluice\n", "Section: net\n", "libc6", "dpdk", "iproute2", "librte-eal"] {
        assert!(control.contains(field), "{field}: {control}");
    }
    let root = dir.path().join("root");
    install(&package, &root);

    let has = |path: &str| root.join(path).exists();
    for program in PROGRAMS {
        let path = root.join("usr/bin").join(program);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755, "{program}");
        assert_eq!(succeed(Command::new(&path).arg("--version")), format!("{program} {}\n", env!("CARGO_PKG_VERSION")));
        for page in std::iter::once(program.to_owned()).chain(commands(&path).iter().map(|name| format!("{program}-{name}"))) {
            let file = format!("usr/share/man/man1/{page}.1.gz");
            assert!(has(&file), "{file}");
        }
        let page = root.join(format!("usr/share/man/man1/{program}.1.gz"));
        let shown = succeed(Command::new("man").args(["--warnings", "-l"]).arg(&page).env("MANPAGER", "cat"));
        assert!(shown.contains("SYNOPSIS") && !shown.contains("warning"), "{shown}");
        for completion in [
            format!("bash-completion/completions/{program}.bash"),
            format!("zsh/vendor-completions/_{program}"),
            format!("fish/vendor_completions.d/{program}.fish"),
        ] {
            assert!(has(&format!("usr/share/{completion}")), "{completion}");
        }
    }
    for unit in ["sluiced", "sluice-controller"] {
        let text = fs::read_to_string(root.join(format!("usr/lib/systemd/system/{unit}.service"))).unwrap();
        let program = text.lines().find_map(|line| line.strip_prefix("ExecStart=/")).unwrap().split(' ').next().unwrap();
        assert!(has(program), "{unit}: {program}");
    }
    let groups = fs::read_to_string(root.join("etc/group")).unwrap();
    assert!(groups.contains("sluice:") && groups.contains("sluice-controller:"), "{groups}");
    assert!(has("etc/sluice") && has("usr/share/doc/sluice/copyright") && has("usr/share/doc/sluice/examples/crds.yaml"));
    let example = root.join("usr/share/doc/sluice/examples/sluice.example.yaml");
    succeed(Command::new(root.join("usr/bin/sluiced")).args(["check", "--config"]).arg(&example));

    let option = format!("--root={}", root.display());
    succeed(Command::new("dpkg").args([&option, "--force-script-chrootless", "--purge", "sluice"]));
    assert!(!has("usr/bin/sluiced") && !has("usr/lib/systemd/system/sluiced.service"));
}
