//! Who owns the VIPs of an election: stations that answer a client's ARP requests, and what keepalived logged.

#![allow(unreachable_pub, dead_code, reason = "each test file uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The client's requests, and who answered.
#[derive(Default)]
pub struct Watch {
    child: Option<Child>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Watch {
    /// Starts `arp_watch.py` in a namespace.
    pub fn start(namespace: &str, interface: &str, interval_ms: &str, vips: &[String]) -> Self {
        let script = format!("{}/tests/edge/arp_watch.py", env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, "python3", &script, interface, interval_ms]).args(vips);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(output.next().unwrap().unwrap(), "ready");
        let watch = Self { child: Some(child), lines: Arc::default() };
        let lines = Arc::clone(&watch.lines);
        std::thread::spawn(move || output.map_while(Result::ok).for_each(|line| lines.lock().unwrap().push(line)));
        watch
    }

    /// Number of lines so far.
    pub fn lines(&self) -> usize {
        self.lines.lock().unwrap().len()
    }

    /// The lines after the first `before`: seconds, VIP, Ethernet addresses.
    pub fn since(&self, before: usize) -> Vec<String> {
        self.lines.lock().unwrap()[before..].to_vec()
    }

    /// The Ethernet addresses that answered the newest request, by VIP.
    pub fn owners(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut owners = BTreeMap::new();
        for line in self.lines.lock().unwrap().iter() {
            let mut words = line.split(' ').skip(1);
            let (Some(vip), Some(macs)) = (words.next(), words.next()) else { continue };
            owners.insert(vip.to_owned(), macs.split(',').filter(|mac| *mac != "-").map(str::to_owned).collect());
        }
        owners
    }

    /// Milliseconds without an answer after the line `before`, of each VIP that had any.
    pub fn outages_ms(&self, before: usize) -> Vec<u64> {
        let mut since = BTreeMap::new();
        let mut outages = Vec::new();
        for line in self.since(before) {
            let words: Vec<_> = line.split(' ').collect();
            let at: f64 = words[0].parse().unwrap();
            if words[2] == "-" {
                since.entry(words[1].to_owned()).or_insert(at);
            } else if let Some(start) = since.remove(words[1]) {
                outages.push(Duration::from_secs_f64(at - start).as_millis().try_into().unwrap());
            }
        }
        outages
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Whether, by the log of a gateway, its newest keepalived has heard the others in each of so many groups.
pub fn has_joined(log: &str, groups: usize) -> bool {
    let last = log.rfind("stands for election again").unwrap_or(0);
    (0..groups).all(|group| log[last..].contains(&format!("\\\"sluice-{group}\\\" BACKUP")))
}
