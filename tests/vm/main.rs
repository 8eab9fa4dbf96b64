//! The lab: the gateway's package on virtual machines with PCI cards, systemd and a whole kernel (`make test-vm`).
//!
//! Steps run one after another on the same machines, in the order of [`steps`]. `SLUICE_VM_STEPS` chooses some of them, or
//! `--skip` leaves some out. Steps of the long matrix run with `--ignored` or `--include-ignored` (`make test-vm-matrix`). A
//! step that fails leaves the journals of the machines in `target/vm`.

#![allow(unreachable_pub, missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod bonds;
mod cards;
#[path = "../edge/mod.rs"]
mod edge;
mod lab;
mod links;
mod machine;
mod nodes;
mod pair;
mod routers;
mod systemd;
mod world;

use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use edge::{built_program, can_create_namespaces, skip};
use lab::Lab;
use libtest_mimic::{Arguments, Failed, Trial};

/// A step: its name, whether it belongs to the long matrix, what it does.
type Step = (&'static str, bool, fn(&mut Lab));

fn steps() -> Vec<Step> {
    let first = [systemd::steps(), cards::steps(), links::steps(), world::steps(), nodes::steps()].concat();
    let last = [systemd::last_steps(), bonds::steps(), routers::steps(), pair::steps(), cards::last_steps()].concat();
    [first, last].concat()
}

/// The steps that `SLUICE_VM_STEPS` chooses by parts of their names, between `|`, whether long or not, and those that
/// install the package, which all others need. Without it, all.
fn chosen_steps() -> Vec<Step> {
    const INSTALLATION: usize = 2;
    let Ok(words) = std::env::var("SLUICE_VM_STEPS") else { return steps() };
    let words: Vec<_> = words.split('|').collect();
    let is_chosen = |name: &str| words.iter().any(|word| name.contains(word));
    let chosen = steps().into_iter().enumerate().filter(|(index, step)| *index < INSTALLATION || is_chosen(step.0));
    chosen.map(|(_, (name, _, step))| (name, false, step)).collect()
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let shared = Arc::new(Mutex::new(Shared::default()));
    let trials = chosen_steps().into_iter().map(|(name, is_long, step)| {
        let shared = Arc::clone(&shared);
        Trial::test(name, move || shared.lock().unwrap().run(name, step)).with_ignored_flag(is_long)
    });
    let is_possible = arguments.list || is_possible();
    let trials = if is_possible { trials.collect() } else { Vec::new() };
    let conclusion = libtest_mimic::run(&arguments, trials);
    for (name, seconds) in &shared.lock().unwrap().seconds {
        println!("{seconds:6.1} s  {name}");
    }
    shared.lock().unwrap().lab = None;
    conclusion.exit_code()
}

/// Whether this host can run virtual machines. If not, reports that the lab is skipped.
fn is_possible() -> bool {
    const LAB: &str = "the lab of virtual machines";
    if cfg!(not(target_arch = "x86_64")) {
        skip(LAB, "the host is no x86-64 machine");
        return false;
    }
    let missing = ["qemu-system-x86_64", "qemu-img", "mmdebstrap", "cargo-deb"]
        .into_iter()
        .find(|tool| Command::new(tool).arg("--version").output().is_err());
    if let Some(tool) = missing {
        skip(LAB, &format!("no `{tool}` here (.ci/install vm package)"));
    }
    missing.is_none() && can_create_namespaces(LAB) && can_have_image(LAB)
}

/// Whether there is an image, or one can be made.
fn can_have_image(lab: &str) -> bool {
    const UNREACHABLE: i32 = 75;
    let status = Command::new(root().join(".ci/vm-image")).stdout(Stdio::null()).status().unwrap();
    if status.code() == Some(UNREACHABLE) {
        skip(lab, "the mirror of Debian packages for its image cannot be reached");
    }
    status.code() != Some(UNREACHABLE)
}

/// The lab, made by the first step, and how long steps took.
#[derive(Default)]
struct Shared {
    lab: Option<Lab>,
    seconds: Vec<(&'static str, f64)>,
}

impl Shared {
    fn run(&mut self, name: &'static str, step: fn(&mut Lab)) -> Result<(), Failed> {
        if self.lab.is_none() {
            let start = Instant::now();
            self.lab = Some(make());
            self.seconds.push(("image and package", start.elapsed().as_secs_f64()));
        }
        let lab = self.lab.as_mut().unwrap();
        let start = Instant::now();
        let mut result = attempt(lab, name, step);
        if result.is_err() && lab.drop_silent() {
            println!("{name}: a machine hangs; the step runs again, on another boot");
            result = attempt(lab, name, step);
            lab.drop_silent();
        }
        self.seconds.push((name, start.elapsed().as_secs_f64()));
        result
    }
}

/// Runs a step. If it fails, writes down the journals of the machines, which tells whether these still answer.
fn attempt(lab: &mut Lab, name: &str, step: fn(&mut Lab)) -> Result<(), Failed> {
    catch_unwind(AssertUnwindSafe(|| step(lab))).map_err(|panic| {
        let why = panic.downcast_ref::<String>().cloned();
        let why = why.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default();
        let file = root().join("target/vm").join(format!("{}.log", name.replace(' ', "-")));
        let journals = journals(lab);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &journals).unwrap();
        let lines: Vec<_> = journals.lines().collect();
        let tail = lines[lines.len().saturating_sub(60)..].join("\n");
        Failed::from(format!("{why}\n--- the end of {}:\n{tail}", file.display()))
    })
}

/// What the machines wrote down since they were booted.
fn journals(lab: &mut Lab) -> String {
    let mut text = String::new();
    for machine in [lab.world.as_mut(), lab.gateway.as_mut()].into_iter().flatten() {
        let console = machine.console();
        let _ = write!(text, "=== {}\n{console}\n--- journal\n", machine.machine.name);
        if machine.is_silent() {
            text += "none: the machine hangs\n";
            continue;
        }
        let lines = || machine.run("journalctl --no-pager -b -o short-precise | grep -v qemu-ga | tail -400").text;
        text += &catch_unwind(AssertUnwindSafe(lines)).unwrap_or_default();
    }
    text
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Makes image, package and network.
fn make() -> Lab {
    let output = Command::new(root().join(".ci/vm-image")).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "an image");
    let image = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    let mut lab = Lab::new(image);
    let package = package(lab.edge.dir.path());
    lab.payload = lab.edge.path("payload.tar");
    lab::make_payload(root(), &package, &lab.payload);
    lab
}

/// The package of `make deb`, if `SLUICE_DEB` names one, else the same package of the programs that were built for tests.
fn package(dir: &Path) -> PathBuf {
    if let Some(package) = std::env::var_os("SLUICE_DEB") {
        return package.into();
    }
    let programs = dir.join("programs");
    std::fs::create_dir(&programs).unwrap();
    for (name, package) in [("sluiced", "sluice"), ("sluice-controller", "control"), ("sluicectl", "sluicectl")] {
        std::fs::copy(built_program(name, package), programs.join(name)).unwrap();
    }
    let output = Command::new(root().join(".ci/package")).args([&programs, &dir.join("out")]).arg("--fast").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read_dir(dir.join("out")).unwrap().next().unwrap().unwrap().path()
}
