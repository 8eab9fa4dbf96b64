//! A headless Chromium, driven by the DevTools protocol over two pipes.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::edge::{DEADLINE, skip};

/// Debian's packages of Chromium, the smaller first.
const PROGRAMS: [&str; 2] = ["chromium-headless-shell", "chromium"];

/// The first of these programs that is installed. If none is, reports the test as skipped.
pub(crate) fn installed(test: &str) -> Option<&'static str> {
    let answers = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    let found = PROGRAMS.into_iter().find(answers);
    if found.is_none() {
        skip(test, "needs chromium-headless-shell (.ci/install test)");
    }
    found
}

/// A browser with one page. Dropping it ends the browser.
pub(crate) struct Browser {
    child: Child,
    requests: File,
    messages: Receiver<Value>,
    last_id: u64,
    session: Option<String>,
    /// What scripts and the browser complained about.
    pub(crate) complaints: Vec<String>,
    /// Requests that [`Browser::intercept`] holds up are answered with this body.
    pub(crate) stub: Option<String>,
}

impl Browser {
    /// Starts it in a network namespace, with its files in `dir`.
    pub(crate) fn start(program: &str, namespace: &str, dir: &Path) -> Self {
        let [input, output] = ["browser-in", "browser-out"].map(|name| dir.join(name));
        assert!(Command::new("mkfifo").args([&input, &output]).status().unwrap().success());
        let profile = format!("--user-data-dir={}", dir.join("browser").display());
        // The browser reads requests from descriptor 3 and writes messages to 4. A sandbox needs a user other than root.
        let arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", &profile];
        let child = Command::new("ip")
            .args(["netns", "exec", namespace, "bash", "-c", "exec \"${@:3}\" 3<\"$1\" 4>\"$2\"", "bash"])
            .args([&input, &output])
            .arg(program)
            .args(arguments)
            .arg("about:blank")
            .env("HOME", dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.join("browser.log")).unwrap())
            .spawn()
            .unwrap();
        // Read and write, so that opening does not wait for the other end.
        let open = |path| OpenOptions::new().read(true).write(true).open(path).unwrap();
        let (requests, mut answers) = (open(&input), BufReader::new(open(&output)));
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            loop {
                let mut message = Vec::new();
                let _ = answers.read_until(0, &mut message);
                message.pop();
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self { child, requests, messages, last_id: 0, session: None, complaints: Vec::new(), stub: None };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let session = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = Some(session["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    fn send(&mut self, method: &str, parameters: &Value) -> u64 {
        self.last_id += 1;
        let mut request = json!({"id": self.last_id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        let mut text = request.to_string().into_bytes();
        text.push(0);
        self.requests.write_all(&text).unwrap();
        self.last_id
    }

    /// Calls a method of the DevTools protocol.
    pub(crate) fn call(&mut self, method: &str, parameters: Value) -> Value {
        let id = self.send(method, &parameters);
        let end = Instant::now() + DEADLINE;
        loop {
            match self.messages.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(mut message) if message["id"] == id => {
                    assert!(message["error"].is_null(), "{method} {parameters}: {message}");
                    return message["result"].take();
                }
                Ok(message) => self.event(&message),
                Err(RecvTimeoutError::Timeout) => panic!("{method}: no answer from the browser"),
                Err(RecvTimeoutError::Disconnected) => panic!("{method}: the browser ended"),
            }
        }
    }

    fn event(&mut self, message: &Value) {
        let parameters = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown" | "Log.entryAdded" => self.complaints.push(parameters.to_string()),
            "Fetch.requestPaused" => {
                use base64::Engine as _;
                let body = base64::engine::general_purpose::STANDARD.encode(self.stub.as_deref().unwrap_or_default());
                let answer = json!({"requestId": parameters["requestId"], "responseCode": 200, "body": body});
                self.send("Fetch.fulfillRequest", &answer);
            }
            _ => {}
        }
    }

    /// Answers requests that match `pattern` from now on with `body` in place of the gateway.
    pub(crate) fn intercept(&mut self, pattern: &str, body: String) {
        self.stub = Some(body);
        self.call("Fetch.enable", json!({"patterns": [{"urlPattern": pattern}]}));
    }

    /// The value of a JavaScript expression.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut result = self.call("Runtime.evaluate", parameters);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].take()
    }

    pub(crate) fn text(&mut self, selector: &str) -> String {
        let found = self.value(&format!("document.querySelector({})?.textContent ?? ''", json!(selector)));
        found.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until a JavaScript expression is true.
    pub(crate) fn wait_for(&mut self, expression: &str) {
        let start = Instant::now();
        while self.value(expression) != true {
            if start.elapsed() > DEADLINE {
                let shown = self.value("document.body.innerText");
                panic!("timeout: {expression}; {:?}; the page shows:\n{}", self.complaints, shown.as_str().unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
    }

    /// Presses and releases a key.
    pub(crate) fn press(&mut self, key: &str) {
        let code = match key {
            "Enter" => 13,
            "Escape" => 27,
            "Tab" => 9,
            "/" => 191,
            _ => panic!("{key}: not in this table"),
        };
        let text = match key {
            "Enter" => "\r",
            "/" => "/",
            _ => "",
        };
        let down = json!({"type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
        self.call("Input.dispatchKeyEvent", down);
        self.call("Input.dispatchKeyEvent", json!({"type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code}));
    }

    /// Types into what has the focus.
    pub(crate) fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Clicks the middle of an element.
    pub(crate) fn click(&mut self, selector: &str) {
        let middle = format!(
            "(() => {{ const e = document.querySelector({}); e.scrollIntoView({{block: 'center'}}); \
             const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()",
            json!(selector)
        );
        let at = self.value(&middle);
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({"type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event);
        }
    }

    /// Size of the window in pixels of CSS.
    pub(crate) fn resize(&mut self, width: u32, height: u32, scale: f64) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    /// What the page learns about the user's wishes, such as `prefers-color-scheme: dark`.
    pub(crate) fn prefer(&mut self, feature: &str, value: &str) {
        self.call("Emulation.setEmulatedMedia", json!({"features": [{"name": feature, "value": value}]}));
    }

    /// Writes what the window shows to a file, as WebP.
    pub(crate) fn screenshot(&mut self, path: &Path) {
        use base64::Engine as _;
        let shot = self.call("Page.captureScreenshot", json!({"format": "webp", "quality": 88}));
        let bytes = base64::engine::general_purpose::STANDARD.decode(shot["data"].as_str().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // `ip netns exec` and bash replace themselves by the browser, whose own children end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
