//! A virtual machine: a QEMU process without KVM, driven over its control socket (QMP) and, inside, by QEMU's guest agent.
//!
//! References: QEMU Machine Protocol and Guest Agent Protocol (<https://www.qemu.org/docs/master/interop/>).

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

/// Timeout of a command in a machine, and of a boot. TCG on a busy host is slow.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Words of the kernel's command line for processors that stand still now and then, as TCG's do on a busy host, and lose a
/// timer interrupt. Linux would mark the TSC as unstable, and a processor that waits for one timer alone would sleep for
/// ever: its tick is therefore periodic.
const WITHOUT_KVM: &str = "no_timer_check tsc=reliable clocksource=tsc nowatchdog nox2apic nohz=off highres=off";

/// Timeout of an answer of QEMU or of the agent, which both give at once.
const ANSWER: Duration = Duration::from_secs(90);

/// How often a machine is booted before its step fails.
const ATTEMPTS: u32 = 3;

/// A network card of a machine.
#[derive(Clone, Debug)]
pub struct Card {
    /// QEMU's device with its properties, such as `igb`.
    pub device: String,
    /// The tap on the host, at most 15 characters.
    pub tap: String,
    /// Queues of the tap.
    pub queues: u32,
    /// The bridge on the host that the tap joins.
    pub bridge: &'static str,
}

/// A machine to boot.
#[derive(Clone, Debug)]
pub struct Machine {
    pub name: &'static str,
    pub cores: u32,
    pub memory_mb: u32,
    /// The cards behind PCIe root ports, so that the one at index `n` has the PCI address of [`pci_address`] and can be
    /// unplugged.
    pub cards: Vec<Card>,
    /// More words of the kernel's command line.
    pub kernel: String,
    /// Whether the machine has an IOMMU.
    pub iommu: bool,
    /// Timeout of a boot, and of each command.
    pub patience: Duration,
}

/// The PCI address of the card at an index.
pub fn pci_address(index: usize) -> String {
    format!("0000:{:02x}:00.0", index + 1)
}

/// What a command in a machine returned.
#[derive(Debug)]
pub struct Outcome {
    pub code: i64,
    /// Standard output and standard error.
    pub text: String,
}

/// A machine that runs. Dropping it ends it at once, like a power cut.
pub struct Running {
    pub machine: Machine,
    process: Process,
    dir: PathBuf,
    control: Lines,
    agent: Lines,
    is_silent: bool,
}

/// QEMU, which ends when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Why a call has no result.
#[derive(Debug)]
enum Failure {
    /// The error that was answered.
    Refused(Value),
    /// No answer.
    Silent(String),
}

/// A socket with lines of JSON.
struct Lines {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Lines {
    fn open(path: &Path, patience: Duration) -> Result<Self, String> {
        let start = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if start.elapsed() > patience => return Err(format!("{}: {error}", path.display())),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        stream.set_write_timeout(Some(patience)).unwrap();
        Ok(Self { reader: BufReader::new(stream.try_clone().unwrap()), stream })
    }

    fn send(&mut self, message: &Value) -> std::io::Result<()> {
        // Whole: QEMU would handle each part of it by itself.
        self.stream.write_all(format!("{message}\n").as_bytes())
    }

    /// Sends a message, and returns the next line that is an answer: events of QMP are passed over.
    fn call(&mut self, message: &Value, patience: Duration) -> Result<Value, Failure> {
        let silent = |error: std::io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Failure::Silent(format!("no answer within {patience:?}")),
            _ => Failure::Silent(format!("no answer: {error}")),
        };
        self.send(message).map_err(silent)?;
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1)))).unwrap();
            let mut line = Vec::new();
            if self.reader.read_until(b'\n', &mut line).map_err(silent)? == 0 {
                return Err(Failure::Silent("QEMU has ended".into()));
            }
            let text = String::from_utf8_lossy(&line);
            let Ok(mut value) = serde_json::from_str::<Value>(text.trim_start_matches(|c| c != '{')) else { continue };
            if let Some(error) = value.get_mut("error") {
                return Err(Failure::Refused(error.take()));
            }
            if let Some(found) = value.get_mut("return") {
                return Ok(found.take());
            }
        }
    }
}

impl Machine {
    /// Boots the machine inside a network namespace of the host, from an overlay of the image, kept in `dir` from boot
    /// to boot. `payload` is a tar archive that the machine finds as its second disk. A boot that hangs is tried again.
    pub fn boot(&self, namespace: &str, image: &Path, payload: &Path, dir: &Path) -> Running {
        fs::create_dir_all(dir).unwrap();
        let mut why = String::new();
        for attempt in 1..=ATTEMPTS {
            match self.start(namespace, image, payload, dir).and_then(Running::greet) {
                Ok(running) => return running,
                Err(reason) => why = reason,
            }
            println!("{}: boot {attempt} of {ATTEMPTS} hangs: {}", self.name, why.lines().next().unwrap_or_default());
        }
        panic!("{} hangs at each of {ATTEMPTS} boots: {why}", self.name)
    }

    /// Starts QEMU, whose process ID it writes into the file `pid` of `dir`.
    fn start(&self, namespace: &str, image: &Path, payload: &Path, dir: &Path) -> Result<Running, String> {
        let disk = dir.join("disk.qcow2");
        if !disk.exists() {
            let backing = image.join("root.img");
            let mut make = Command::new("qemu-img");
            make.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).args([&backing, &disk]);
            assert!(make.status().unwrap().success(), "an overlay");
        }
        for socket in ["qmp", "agent"] {
            let _ = fs::remove_file(dir.join(socket));
        }
        let log = File::options().create(true).append(true).open(dir.join("qemu.log")).unwrap();
        // The machine ends with the thread that boots it, however that ends.
        let process = Command::new("ip")
            .args(["netns", "exec", namespace, "setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"])
            .args(self.arguments(image, payload, &disk, dir))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let process = Process(process);
        let mut control = Lines::open(&dir.join("qmp"), self.patience)?;
        control
            .call(&json!({"execute": "qmp_capabilities"}), self.patience)
            .map_err(|failure| format!("QEMU's control socket: {failure:?}"))?;
        for card in &self.cards {
            join(namespace, card);
        }
        let agent = Lines::open(&dir.join("agent"), self.patience)?;
        Ok(Running { machine: self.clone(), process, dir: dir.to_owned(), control, agent, is_silent: false })
    }

    fn arguments(&self, image: &Path, payload: &Path, disk: &Path, dir: &Path) -> Vec<String> {
        let dir = dir.display();
        let mut words = words("-nodefaults -display none -accel tcg,thread=multi -cpu max,-svm");
        words.extend(["-machine".into(), "q35,kernel-irqchip=split,hpet=off".into()]);
        words.extend(["-smp".into(), self.cores.to_string(), "-m".into(), self.memory_mb.to_string()]);
        if self.iommu {
            words.extend(["-device".into(), "intel-iommu,intremap=on,caching-mode=on".into()]);
        }
        let iommu = if self.iommu { "intel_iommu=on" } else { "" };
        let kernel = format!("root=/dev/vda rw console=ttyS0 net.ifnames=0 panic=-1 {WITHOUT_KVM} {iommu} {}", self.kernel);
        for (option, value) in [
            ("-kernel", image.join("vmlinuz").display().to_string()),
            ("-initrd", image.join("initrd").display().to_string()),
            ("-append", kernel),
            ("-drive", format!("file={},if=none,id=root", disk.display())),
            ("-device", "virtio-blk-pci,drive=root".into()),
            ("-drive", format!("file={},if=none,id=payload,format=raw,readonly=on", payload.display())),
            ("-device", "virtio-blk-pci,drive=payload".into()),
            ("-serial", format!("file:{dir}/console.log")),
            ("-pidfile", format!("{dir}/pid")),
            ("-qmp", format!("unix:{dir}/qmp,server=on,wait=off")),
            ("-chardev", format!("socket,path={dir}/agent,server=on,wait=off,id=agent")),
            ("-device", "virtio-serial-pci".into()),
            ("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0".into()),
        ] {
            words.extend([option.into(), value]);
        }
        for (index, card) in self.cards.iter().enumerate() {
            let slot = format!("pcie-root-port,id=slot{index},chassis={},bus=pcie.0,addr={:#x}.0", index + 1, 0x10 + index);
            words.extend(["-device".into(), slot, "-netdev".into(), card.netdev(index)]);
            words.extend(["-device".into(), self.device_of(index)]);
        }
        words
    }

    fn device_of(&self, index: usize) -> String {
        let mac = self.mac(index);
        format!("{},id=card{index},netdev=net{index},mac={mac},romfile=,bus=slot{index}", self.cards[index].device)
    }

    /// The Ethernet address of the card at an index.
    pub fn mac(&self, index: usize) -> String {
        format!("52:54:00:{:02x}:00:{:02x}", self.name.len(), index + 1)
    }
}

impl Card {
    fn netdev(&self, index: usize) -> String {
        let queues = if self.queues > 1 { format!(",queues={}", self.queues) } else { String::new() };
        format!("tap,id=net{index},ifname={},script=no,downscript=no,vhost=off{queues}", self.tap)
    }
}

/// Joins the tap of a card, which QEMU made, to its bridge.
fn join(namespace: &str, card: &Card) {
    let status =
        Command::new("ip").args(["-n", namespace, "link", "set", &card.tap, "master", card.bridge, "up"]).status().unwrap();
    assert!(status.success(), "{} joins {}", card.tap, card.bridge);
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

impl Running {
    /// Waits for the agent, which speaks once the machine is up. What was written before it opened its port may be lost,
    /// so it is asked again and again.
    fn greet(mut self) -> Result<Self, String> {
        let start = Instant::now();
        let id = u64::from(std::process::id());
        self.agent.stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        loop {
            // 0xff resets the agent's parser, and marks the answer: what came before it belongs to nobody.
            let question = json!({"execute": "guest-sync-delimited", "arguments": {"id": id}});
            let asked = self.agent.stream.write_all(b"\xff").and_then(|()| self.agent.send(&question));
            let mut line = Vec::new();
            let found = asked.and_then(|()| self.agent.reader.read_until(b'\n', &mut line));
            if found.is_ok() && String::from_utf8_lossy(&line).contains(&format!("\"return\": {id}")) {
                break;
            }
            let has_ended = self.process.0.try_wait().unwrap().is_some();
            if start.elapsed() > self.machine.patience || has_ended {
                let why = if has_ended { "QEMU has ended" } else { "the agent does not answer" };
                return Err(format!("{why} ({:.0?})\n{}", start.elapsed(), self.console()));
            }
        }
        // Answers to the same question that was asked before.
        self.agent.stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        while self.agent.reader.read_until(b'\n', &mut Vec::new()).is_ok_and(|length| length > 0) {}
        Ok(self)
    }

    /// Whether a call had no answer: the machine hangs, and only another boot helps.
    pub fn is_silent(&self) -> bool {
        self.is_silent
    }

    /// The result of a call, or its refusal. A machine that does not answer ends the step.
    fn judge(&mut self, what: &str, result: Result<Value, Failure>) -> Result<Value, Value> {
        match result {
            Ok(value) => Ok(value),
            Err(Failure::Refused(error)) => Err(error),
            Err(Failure::Silent(why)) => {
                self.is_silent = true;
                panic!("the machine {} hangs: {why} to: {what}", self.machine.name)
            }
        }
    }

    /// Calls QEMU.
    pub fn control(&mut self, command: &str, arguments: &Value) -> Result<Value, Value> {
        let message = json!({"execute": command, "arguments": arguments});
        let result = self.control.call(&message, ANSWER.min(self.machine.patience));
        self.judge(command, result)
    }

    /// Calls the agent, for shell code.
    fn ask(&mut self, code: &str, message: &Value) -> Value {
        assert!(!self.is_silent, "the machine {} hangs, and is not asked again: {code}", self.machine.name);
        let result = self.agent.call(message, ANSWER.min(self.machine.patience));
        self.judge(code, result).unwrap_or_else(|error| panic!("{code}: {error}"))
    }

    /// Runs shell code as root.
    pub fn run(&mut self, code: &str) -> Outcome {
        let patience = self.machine.patience;
        let arguments = json!({"path": "/bin/bash", "arg": ["-c", code], "capture-output": true});
        let pid = self.ask(code, &json!({"execute": "guest-exec", "arguments": arguments}))["pid"].clone();
        let start = Instant::now();
        let mut pause = Duration::from_millis(20);
        loop {
            let state = self.ask(code, &json!({"execute": "guest-exec-status", "arguments": {"pid": pid}}));
            if state["exited"] == true {
                let part = |name: &str| state[name].as_str().map_or(Vec::new(), |text| BASE64_STANDARD.decode(text).unwrap());
                let text = [part("out-data"), part("err-data")].concat();
                let code = state["exitcode"].as_i64().unwrap_or(-1);
                return Outcome { code, text: String::from_utf8_lossy(&text).into_owned() };
            }
            assert!(start.elapsed() < patience, "{code}: runs for more than {patience:?} on {}", self.machine.name);
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// Runs shell code that must succeed, and returns its output.
    pub fn succeed(&mut self, code: &str) -> String {
        let outcome = self.run(code);
        assert_eq!(outcome.code, 0, "{} on {}:\n{}", code, self.machine.name, outcome.text);
        outcome.text
    }

    /// Runs shell code again and again until it succeeds, and returns its output.
    pub fn until(&mut self, what: &str, code: &str) -> String {
        let start = Instant::now();
        loop {
            let outcome = self.run(code);
            if outcome.code == 0 {
                return outcome.text;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: not after {PATIENCE:?}:\n{code}\n{}", outcome.text);
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// The Linux interface of the card at an index, which the kernel's driver has.
    pub fn interface(&mut self, index: usize) -> String {
        let device = format!("/sys/bus/pci/devices/{}", pci_address(index));
        self.succeed(&format!("ls {device}/net {device}/virtio*/net 2>/dev/null | grep -v : | grep .; true")).trim().to_owned()
    }

    /// Gives a PCI device to another kernel driver.
    pub fn bind(&mut self, address: &str, driver: &str) {
        self.succeed(&format!(
            "cd /sys/bus/pci/devices/{address} && echo {driver} >driver_override && echo {address} >driver/unbind && \
             echo {address} >/sys/bus/pci/drivers_probe"
        ));
    }

    /// Writes a file.
    pub fn write(&mut self, path: &str, text: &str) {
        let data = BASE64_STANDARD.encode(text);
        self.succeed(&format!("mkdir -p $(dirname {path}) && base64 -d >{path}.new <<<'{data}' && mv {path}.new {path}"));
    }

    /// Unplugs the card at an index: asks the machine, which must give it back.
    pub fn unplug(&mut self, index: usize) {
        self.control("device_del", &json!({"id": format!("card{index}")})).unwrap();
    }

    /// Plugs a card that was unplugged into its slot again.
    pub fn plug(&mut self, index: usize) -> Result<Value, Value> {
        let text = self.machine.device_of(index);
        let mut words = text.split(',');
        let mut arguments = json!({"driver": words.next()});
        for word in words {
            let (key, value) = word.split_once('=').unwrap();
            let value = match value {
                "on" => json!(true),
                "off" => json!(false),
                _ => value.parse::<u64>().map_or_else(|_| json!(value), |number| json!(number)),
            };
            arguments[key] = value;
        }
        self.control("device_add", &arguments)
    }

    /// Whether QEMU has no card at an index any more.
    pub fn is_unplugged(&mut self, index: usize) -> bool {
        let devices = self.control("qom-list", &json!({"path": "/machine/peripheral"})).unwrap();
        !devices.as_array().unwrap().iter().any(|device| device["name"] == format!("card{index}"))
    }

    /// Takes the cable of the card at an index out, or puts it in.
    pub fn set_link(&mut self, index: usize, is_up: bool) {
        self.control("set_link", &json!({"name": format!("card{index}"), "up": is_up})).unwrap();
    }

    /// What QEMU complained of, and the last lines of the console.
    pub fn console(&self) -> String {
        let text = fs::read(self.dir.join("console.log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<_> = text.lines().collect();
        let qemu = fs::read_to_string(self.dir.join("qemu.log")).unwrap_or_default();
        format!("{qemu}\n{}", lines[lines.len().saturating_sub(40)..].join("\n"))
    }
}
