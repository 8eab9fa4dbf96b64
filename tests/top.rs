//! `sluicectl top` in a pseudo terminal, against a real gateway with traffic: what it shows, its keys, and what it does
//! while the gateway is gone. It asks the read-only socket.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::num::NonZero;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use edge::{Edge, built_program, until};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// A program in a pseudo terminal, and its screen.
struct Screen {
    program: Child,
    keyboard: File,
    emulator: Arc<Mutex<vt100::Parser>>,
}

impl Screen {
    /// Starts `top`, which writes no colours.
    fn start(program: &Path, socket: &Path) -> Self {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let terminal = || {
            File::from(rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap())
        };
        let emulator = Arc::new(Mutex::new(vt100::Parser::new(characters(24), characters(80), 0)));
        let mut screen_end = File::from(keyboard.try_clone().unwrap());
        let screen = Arc::clone(&emulator);
        set_size(&screen_end, 80, 24);
        // `setsid` makes it the controlling terminal, so that a change of its size is signalled, and becomes the program.
        let program = Command::new("setsid")
            .arg("--ctty")
            .arg(program)
            .arg(format!("--server=unix:{}", socket.display()))
            .args(["top", "--delay", "0.2"])
            .env("TERM", "xterm")
            .env("NO_COLOR", "1")
            .stdin(terminal())
            .stdout(terminal())
            .stderr(terminal())
            .spawn()
            .unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Reading fails once the program has closed the terminal.
            while let Ok(count @ 1..) = screen_end.read(&mut bytes) {
                screen.lock().unwrap().process(&bytes[..count]);
            }
        });
        Self { program, keyboard: File::from(keyboard), emulator }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn text(&self) -> String {
        self.emulator.lock().unwrap().screen().contents()
    }

    /// Waits until a line has all the texts, and returns it.
    fn wait_for(&self, texts: &[&str]) -> String {
        until(&format!("{texts:?} on the screen"), || {
            let text = self.text();
            let line = text.lines().find(|line| texts.iter().all(|text| line.contains(text)));
            line.map(str::to_owned)
        })
    }

    fn resize(&self, columns: u16, lines: u16) {
        self.emulator.lock().unwrap().screen_mut().set_size(characters(lines), characters(columns));
        set_size(&self.keyboard, columns, lines);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the screen:\n{}", self.text());
        }
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

fn characters(count: u16) -> NonZero<u16> {
    NonZero::new(count).unwrap()
}

fn set_size(terminal: &File, columns: u16, lines: u16) {
    tcsetwinsize(terminal, Winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
}

/// Waits for a line with the text and a number above 0 in this column of words.
fn wait_for_rate(screen: &Screen, text: &str, column: usize) {
    until(&format!("a rate of {text}"), || {
        let text_now = screen.text();
        let line = text_now.lines().find(|line| line.starts_with(text))?;
        let word = line.split_whitespace().nth(column)?;
        (!matches!(word, "0" | "-")).then_some(())
    });
}

fn without_a_terminal_it_says_what_else_to_use(program: &Path, socket: &Path) {
    let server = format!("--server=unix:{}", socket.display());
    let output = Command::new(program).args([&server, "top"]).stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    assert!(error.contains("needs a terminal") && error.contains("sluicectl services --watch"), "{error}");
    let output = Command::new(program).args(["top", "-d", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("expected 0.2 to 3600"));
}

fn figures_are_live(screen: &mut Screen) {
    // SERVICE STATE UP FLOWS NEW/s PKT/s BIT/s
    screen.wait_for(&["demo/web ", " ok ", " 6/6 "]);
    for column in 3..7 {
        wait_for_rate(screen, "demo/web ", column);
    }
    wait_for_rate(screen, "Pkt/s", 1);
    assert!(screen.text().contains('█'), "a history");
}

fn keys_lead_from_a_service_to_its_flows_and_back(screen: &mut Screen) {
    screen.press("/demo/web\r");
    screen.press("\r");
    screen.wait_for(&["Backends of service demo/web: 6"]);
    screen.press("\x1bOS10.0.0.11\r"); // F4
    screen.wait_for(&["Backends of service demo/web: 1; only with \"10.0.0.11\""]);
    screen.wait_for(&["10.0.0.11:8080 ", " healthy "]);
    screen.press("\r");
    screen.wait_for(&["Flows of backend 10.0.0.11:8080 of service demo/web: "]);
    screen.wait_for(&["192.0.2.10:", " tcp ", "192.0.2.100:80"]);
    screen.press("\x1b");
    screen.wait_for(&["Backends of service demo/web: 1"]);
    screen.press("\x1b");
    screen.wait_for(&["Backends of service demo/web: 6"]);
    screen.press("\x1b");
    screen.wait_for(&["Services: "]);
}

fn keys_show_the_other_views(screen: &mut Screen) {
    for (key, texts) in [
        ("4", &["0 polls ", "%"][..]),
        ("6", &["uplink ", " up "]),
        ("7", &["test ", " ready "]),
        ("\x1bOP", &["sluicectl top: keys"]), // F1
        ("x", &["[7 Gateways]"]),
        ("\t", &["[8 Top]"]),
        ("", &["192.0.2.10 ", "all flows"]),
        ("\t", &["[1 Services]"]),
        ("\x1b[17~", &["Sort by"]), // F6
        ("\x1b", &["F1 Help"]),
        (" ", &["PAUSED"]),
        (" ", &["every 0.2 s"]),
    ] {
        screen.press(key);
        screen.wait_for(texts);
    }
    screen.resize(40, 10);
    screen.wait_for(&["40x10 is too small"]);
    screen.resize(120, 40);
    screen.wait_for(&["SERVICE", "HISTORY", "MODE"]);
}

fn without_the_gateway_the_last_figures_stay(edge: &mut Edge, screen: &Screen) {
    assert_eq!(edge.stop(false), Some(0));
    screen.wait_for(&["test disconnected since ", "retrying: "]);
    screen.wait_for(&["demo/web ", " 6/6 "]);
    edge.start();
    screen.wait_for(&["test 0.1.0", "ready", "every 0.2 s"]);
    wait_for_rate(screen, "demo/web ", 5);
}

#[test]
fn a_terminal_shows_a_gateway_at_work() {
    let Some(mut edge) = Edge::with_af_packet("sluicectl top in a terminal", "top") else { return };
    let (program, socket) = (built_program("sluicectl", "sluicectl"), edge.path("admin-view.sock"));
    edge.write_demo_manifests();
    edge.start();
    without_a_terminal_it_says_what_else_to_use(&program, &socket);
    let requests = "echo ready; while :; do curl -s -o /dev/null --max-time 2 http://192.0.2.100/; sleep 0.05; done";
    let (_traffic, _) = edge.start_program("client", &["bash", "-c", requests]);
    let mut screen = Screen::start(&program, &socket);
    figures_are_live(&mut screen);
    keys_lead_from_a_service_to_its_flows_and_back(&mut screen);
    keys_show_the_other_views(&mut screen);
    without_the_gateway_the_last_figures_stay(&mut edge, &screen);
    {
        let emulator = screen.emulator.lock().unwrap();
        let cells = (0..40).flat_map(|line| (0..120).map(move |column| (line, column)));
        let mut colours = cells.filter_map(|(line, column)| emulator.screen().cell(line, column).map(vt100::Cell::fgcolor));
        assert!(colours.all(|colour| colour == vt100::Color::Default), "NO_COLOR");
        assert!(emulator.screen().alternate_screen());
    }
    screen.press("\x1b[21~"); // F10
    let status = until("top ends", || screen.program.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
    until("the terminal is restored", || (!screen.emulator.lock().unwrap().screen().alternate_screen()).then_some(()));
}
