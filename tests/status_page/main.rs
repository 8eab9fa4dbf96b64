//! The status page of a real gateway in a real browser: by mouse, by keyboard, on a phone, in the dark, for a screen
//! reader; and what it shows when there is nothing, too much, something hostile, or no answer.
//!
//! With `SLUICE_AXE=FILE`, `axe.min.js` of the npm package `axe-core`, that looks for mistakes of accessibility, too.
//! With `SLUICE_SCREENSHOTS=DIR` it writes the pictures of the documentation into that folder, after three minutes of traffic.

#![allow(clippy::unwrap_used, clippy::panic)]

mod browser;
#[path = "../edge/mod.rs"]
mod edge;

use std::path::{Path, PathBuf};
use std::time::Duration;

use browser::Browser;
use edge::{Edge, ServiceManifest, skip, until};
use rustix::process::Signal;
use serde_json::{Value, json};

const PAGE: &str = "http://127.0.0.1:9435/";

/// Text colours on what is behind them, of everything that shows text: the lowest ratio of contrast (WCAG 2.2, 1.4.3).
const LOWEST_CONTRAST: &str = "(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
  };
  const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const seen = [...document.querySelectorAll('body *')].filter((element) => own(element) && element.getClientRects().length);
  return Math.min(...seen.filter((element) => !['SCRIPT', 'STYLE'].includes(element.tagName)).map((element) => {
    const style = getComputedStyle(element);
    const [a, b] = [light(element instanceof SVGElement ? style.fill : style.color), light(behind(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
})()";

/// Elements that make the page wider than the window: those beyond its right edge that no parent cuts off or scrolls.
const WIDER_THAN_THE_WINDOW: &str = "(() => {
  const cut = (element) => element && (getComputedStyle(element).overflowX !== 'visible' || cut(element.parentElement));
  const beyond = [...document.querySelectorAll('body *')].filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5);
  const names = beyond.filter((element) => !cut(element.parentElement)).map((element) => `${element.tagName} ${element.textContent}`);
  return document.documentElement.scrollWidth > innerWidth ? [`${document.documentElement.scrollWidth} pixels`, ...names] : [];
})()";

/// Roles and names of the accessibility tree, as `role name`.
fn accessible(browser: &mut Browser) -> Vec<String> {
    let tree = browser.call("Accessibility.getFullAXTree", json!({}));
    let nodes = tree["nodes"].as_array().unwrap().iter().filter(|node| node["ignored"] == false);
    let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
    nodes.map(|node| format!("{} {}", text(&node["role"]), text(&node["name"])).trim().to_owned()).collect()
}

/// The Services of the test: one with two families, one with a dead backend, one without traffic, one without backends.
fn write_services(edge: &Edge) {
    edge.write_demo_manifests();
    let rows: [(&str, &str, u16, &[u8]); 4] = [
        ("checkout", "192.0.2.111", 443, &[12, 13, 99]),
        ("images", "192.0.2.112", 80, &[11, 12, 13]),
        ("mail", "192.0.2.113", 25, &[12]),
        ("reports", "192.0.2.114", 8443, &[]),
    ];
    for (name, address, port, servers) in rows {
        let manifest = ServiceManifest { name, address, port, target_port: 8080, servers, ..ServiceManifest::default() };
        edge.write_manifest(&format!("{name}.yaml"), &manifest.yaml());
    }
}

/// Sends requests to three Services, and packets that are dropped, for at most ten minutes.
fn send_traffic(edge: &Edge) -> Vec<edge::Program> {
    let requests = "echo ready; for i in $(seq 12000); do curl -sg -o /dev/null --max-time 2 \"$1\"; sleep \"$2\"; done";
    let urls = [("http://192.0.2.100/", "0.02"), ("http://192.0.2.111:443/", "0.1"), ("http://[2001:db8::1:0]/", "0.1")];
    let start = |(url, pause): (&str, &str)| edge.start_program("client", &["bash", "-c", requests, "bash", url, pause]).0;
    let mut programs: Vec<_> = urls.into_iter().map(start).collect();
    let unknown = "from scapy.all import IP, TCP, conf\nimport time\nsocket = conf.L3socket(iface='eth0')\nprint('ready', flush=True)\n\
                   for n in range(3000):\n  socket.send(IP(dst='192.0.2.112')/TCP(sport=2000 + n, dport=80, flags='A'))\n  time.sleep(0.2)";
    programs.push(edge.start_program("client", &["/usr/bin/python3", "-c", unknown]).0);
    programs
}

/// A page with figures: every counter was read twice.
fn wait_for_rates(browser: &mut Browser) {
    let rate = |name: &str| {
        format!(
            "parseFloat([...document.querySelectorAll('#figures > div')].find(d => d.firstChild.textContent == '{name}').children[1].textContent) > 0"
        )
    };
    browser.wait_for(&rate("To backends"));
    browser.wait_for(&rate("To clients"));
    browser.wait_for(&rate("Throughput"));
}

/// Presses Tab until the focus is on a button of the table of Services, and returns its text.
fn tab_to_a_service(browser: &mut Browser) -> String {
    for _ in 0..40 {
        browser.press("Tab");
        if browser.value("document.activeElement.closest('#services') !== null") == true {
            return browser.value("document.activeElement.textContent").as_str().unwrap().to_owned();
        }
    }
    panic!("no Service gets the focus by Tab");
}

fn an_empty_gateway_says_what_it_waits_for(browser: &mut Browser) {
    browser.open(PAGE);
    browser.wait_for("document.querySelector('#nothing h3')?.textContent === 'No Services yet'");
    assert!(browser.text("#state").starts_with("Forwarding · 0 Services"), "{}", browser.text("#state"));
    browser.wait_for("getComputedStyle(document.querySelector('#path')).display === 'none'");
}

fn services_show_rates_and_trouble(browser: &mut Browser) {
    browser.wait_for("document.querySelectorAll('#services tbody tr').length === 6");
    wait_for_rates(browser);
    let row = |name: &str| {
        format!("[...document.querySelectorAll('#services tbody tr')].find(r => r.cells[0].textContent === 'demo/{name}')")
    };
    browser.wait_for(&format!("parseFloat({}.cells[4].textContent) > 0", row("web")));
    browser.wait_for(&format!("{}.cells[3].textContent === '2 of 3 healthy'", row("checkout")));
    browser.wait_for(&format!("{}.cells[3].textContent === 'no backends'", row("reports")));
    // In the picture too: by a word, not by colour alone.
    browser.wait_for("[...document.querySelectorAll('#picture text.bad')].some(t => t.textContent === 'unhealthy')");
    browser
        .wait_for("[...document.querySelectorAll('#picture .link')].some(l => parseFloat(l.getAttribute('stroke-width')) > 10)");
    browser.wait_for("[...document.querySelectorAll('#drops tbody tr')].some(r => r.cells[0].textContent === 'no_flow' && parseFloat(r.cells[1].textContent) > 0)");
    browser.wait_for("parseFloat(document.querySelector('#workers tbody tr').cells[2].textContent) > 0");
    browser.wait_for("document.querySelectorAll('#ports tbody tr').length === 2");
    browser.wait_for("[...document.querySelectorAll('#events li')].some(e => e.textContent.includes('demo/web'))");
    assert!(browser.text("#state").contains("2 with trouble"), "{}", browser.text("#state"));
}

/// The Services with trouble are the first in the picture, and behind the link that counts them.
fn the_link_shows_those_with_trouble(browser: &mut Browser) {
    let first = browser.value("[...document.querySelectorAll('#picture text.strong')].map(t => t.textContent).filter(t => t.startsWith('demo/')).slice(0, 2).sort()");
    assert_eq!(first, json!(["demo/checkout", "demo/reports"]));
    for _ in 0..3 {
        browser.press("Tab");
        if browser.value("document.activeElement.textContent") == "2 with trouble" {
            break;
        }
    }
    assert_eq!(browser.value("document.activeElement.textContent"), "2 with trouble", "by keyboard");
    browser.press("Enter");
    browser.wait_for("document.querySelectorAll('#services tbody tr').length === 2");
    assert_eq!(browser.value("location.hash"), "#only=trouble");
    browser.wait_for("document.querySelector('#list-note').textContent === '2 of 6 Services with trouble'");
    browser.click("#all");
    browser.wait_for("document.querySelectorAll('#services tbody tr').length === 6");
    assert_eq!(browser.value("location.hash"), "");
}

/// A page that has just been opened shows the minutes before.
fn lines_begin_before_the_page(browser: &mut Browser) {
    let points = "(document.querySelector('#figures .spark path:nth-child(2)')?.getAttribute('d') ?? '').split(/[ML]/).length";
    browser.wait_for(&format!("{points} > 5"));
    browser.open("about:blank");
    browser.wait_for("location.href === 'about:blank'");
    browser.open(PAGE);
    browser.wait_for(&format!("typeof rates !== 'undefined' && rates.round > 0 && rates.round < 3 && {points} > 5"));
    browser.wait_for("document.querySelectorAll('#heaviest-clients tbody tr').length > 0");
    wait_for_rates(browser);
    // While nothing is laid out, nothing is drawn.
    browser.value("document.querySelector('main').hidden = true; showPicture(live.document, live.document.totals); document.querySelector('main').hidden = false");
}

/// The rules of axe, in a few views at three widths; if there is axe.
fn axe_finds_nothing(browser: &mut Browser) {
    let Some(axe) = std::env::var_os("SLUICE_AXE") else {
        return skip("status page: axe", "SLUICE_AXE names no axe.min.js");
    };
    let axe = std::fs::read_to_string(axe).unwrap();
    for fragment in ["", "service=demo%2Fcheckout", "only=trouble", "search=nothing-like-it"] {
        browser.value(&format!("location.hash = '{fragment}'"));
        browser.wait_for(&format!("document.querySelector('#one').hidden === {}", !fragment.starts_with("service")));
        for width in [390, 768, 1360] {
            fits_into(browser, width);
            browser.value(&format!("{axe}; null"));
            let found = browser.value(
                "axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations.map((one) => \
                 `${one.id}: ${one.nodes.map((node) => node.target.join(' ')).join(', ')}`))",
            );
            assert_eq!(found, json!([]), "#{fragment} at {width} pixels");
        }
    }
    browser.value("location.hash = ''");
    browser.wait_for("document.querySelectorAll('#services tbody tr').length === 6");
}

fn the_mouse_opens_a_service_in_the_picture(browser: &mut Browser) {
    browser.click("[data-key='recttarget demo/checkout']");
    browser.wait_for("document.querySelector('#path-title').textContent === 'demo/checkout'");
    browser.wait_for("[...document.querySelectorAll('#members tbody tr')].some(r => parseFloat(r.cells[3].textContent) > 0)");
    let dead = browser.value("document.querySelector('#members tbody tr').textContent");
    assert!(dead.as_str().unwrap().starts_with("10.0.0.99:8080tcpunhealthy"), "{dead}");
    let is_whole = "(why => why.textContent && !why.textContent.includes('os error') && why.scrollWidth <= why.clientWidth)";
    browser.wait_for(&format!("{is_whole}(document.querySelector('#members .why'))"));
    assert_eq!(browser.value("location.hash"), "#service=demo%2Fcheckout");
    browser.value("history.back()");
    browser.wait_for("document.querySelector('#path-title').textContent === 'Traffic'");
}

fn keys_search_open_and_return(browser: &mut Browser) {
    browser.press("/");
    assert_eq!(browser.value("document.activeElement.id"), "search");
    browser.write("IMAG");
    browser.wait_for("document.querySelectorAll('#services tbody tr').length === 1");
    browser.press("Escape");
    browser.wait_for("document.querySelectorAll('#services tbody tr').length === 6");
    browser.write("10.0.0.99");
    browser.wait_for("document.querySelector('#list-note').textContent === '1 of 6 Services match'");
    let name = tab_to_a_service(browser);
    assert_eq!(name, "demo/checkout");
    assert_ne!(browser.value("getComputedStyle(document.activeElement).outlineStyle"), "none", "the focus is visible");
    browser.press("Enter");
    browser.wait_for("document.querySelectorAll('#members tbody tr').length === 3");
    assert_eq!(browser.value("document.activeElement.id"), "path-title");
    browser.press("Escape");
    browser.wait_for("document.activeElement.textContent === 'demo/checkout' && document.activeElement.tagName === 'BUTTON'");
    browser.press("/");
    browser.write("<img src=x>");
    browser.wait_for("document.querySelector('#nothing h3')?.textContent === 'Nothing matches “<img src=x>”'");
    browser.press("Escape");
    browser.wait_for("document.querySelectorAll('#services tbody tr').length === 6");
}

fn a_screen_reader_finds_its_way(browser: &mut Browser) {
    let tree = accessible(browser);
    let landmarks = ["banner", "search", "main", "complementary Gateway", "contentinfo", "table Services", "heading Services"];
    let landmarks = landmarks.into_iter().chain(["searchbox Search Services, addresses, reasons and events", "button demo/web"]);
    let missing: Vec<_> = landmarks.filter(|name| !tree.iter().any(|node| node == name)).collect();
    assert!(missing.is_empty(), "{missing:?} in {tree:#?}");
    assert!(tree.iter().any(|node| node.starts_with("image Clients send ") && node.contains("demo/checkout")), "{tree:#?}");
    assert_eq!(browser.value("document.querySelectorAll('[aria-live], [role=status], [role=alert]').length"), 1);
    browser.prefer("prefers-reduced-motion", "reduce");
    assert_eq!(browser.value("getComputedStyle(document.querySelector('.bar i')).transitionDuration"), "0s");
}

/// Asserts that the page is no wider than a window of this width.
fn fits_into(browser: &mut Browser, width: u32) {
    browser.resize(width, 800, 1.0);
    // The picture is drawn again for the width.
    browser.wait_for("document.querySelector('#picture').viewBox.baseVal.width <= innerWidth");
    assert_eq!(browser.value("innerWidth"), width);
    assert_eq!(browser.value(WIDER_THAN_THE_WINDOW), json!([]), "at {width} pixels");
}

fn phones_and_dark_rooms_are_served(browser: &mut Browser) {
    for width in [320, 390, 768, 1360] {
        fits_into(browser, width);
    }
    let mut grounds = Vec::new();
    for scheme in ["light", "dark"] {
        browser.prefer("prefers-color-scheme", scheme);
        grounds.push(browser.value("getComputedStyle(document.documentElement).backgroundColor"));
        let contrast = browser.value(LOWEST_CONTRAST).as_f64().unwrap();
        assert!(contrast >= 4.5, "{scheme}: {contrast}");
    }
    assert_ne!(grounds[0], grounds[1]);
}

fn a_silent_gateway_is_reported_until_it_answers(edge: &Edge, browser: &mut Browser) {
    edge.signal(Signal::STOP);
    browser.wait_for("document.querySelector('#notice').textContent.startsWith('No answer from the gateway.')");
    assert_eq!(browser.value("document.body.classList.contains('stale')"), true);
    edge.signal(Signal::CONT);
    browser.wait_for("document.querySelector('#notice').textContent === '' && !document.body.classList.contains('stale')");
}

/// Names that no API server would accept, and as many Services as the document may have, of 10,000.
fn many_hostile_services_stay_text(edge: &Edge, browser: &mut Browser) {
    let output = edge.run("gw", &["curl", "-s", &format!("{PAGE}status.json")]);
    let mut document: Value = serde_json::from_slice(&output.stdout).unwrap();
    document["totals"]["services"] = 10_000.into();
    document["matched"] = 10_000.into();
    document["events"][0]["message"] = "<script>document.title = 'owned'</script>".into();
    let row = document["services"][0].clone();
    let named = |n: u32| {
        let mut row = row.clone();
        row["name"] = format!("{n}/<img src=x onerror=\"document.title='owned'\">").into();
        row
    };
    document["services"] = (0..500).map(named).collect();
    document["picture"] = (0..6).map(named).collect();
    browser.intercept("*/status.json*", document.to_string());
    browser.open(&format!("{PAGE}#sort=name"));
    browser.wait_for("document.querySelectorAll('#services tbody tr').length === 500");
    assert_eq!(browser.text("#list-note"), "500 shown · 10,000 Services");
    assert_eq!(browser.value("document.images.length + document.querySelectorAll('script').length"), 1);
    assert!(!browser.text("title").contains("owned"));
    assert!(browser.value("document.querySelectorAll('#picture *').length").as_u64().unwrap() < 200, "the picture is bounded");
    fits_into(browser, 390);
}

/// A busy gateway of 100,000 backends: large numbers do not make the page wider than the window.
fn large_figures_fit(edge: &Edge, browser: &mut Browser) {
    let output = edge.run("gw", &["curl", "-s", &format!("{PAGE}status.json?service=demo/checkout")]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let at_rate = |seconds: u64| {
        let mut document = document.clone();
        count_up(&mut document, 10_000_000_000 + 12_450_000_000 * seconds, 1000 * seconds);
        document["gateway"] = "gateway-of-the-second-rack-in-the-northern-hall.example.org".into();
        document.to_string()
    };
    browser.intercept("*/status.json*", at_rate(1));
    browser.open(PAGE);
    browser.wait_for("document.querySelectorAll('#ports tbody tr').length === 2");
    browser.stub = Some(at_rate(2));
    browser.wait_for("document.querySelector('#ports tbody tr').cells[2].textContent === '99.6 Gbit/s'");
    browser.wait_for("document.querySelector('#figures .big').textContent === '12.4 Gpps'");
    for fragment in ["", "service=demo%2Fcheckout"] {
        browser.value(&format!("location.hash = '{fragment}'"));
        browser.wait_for(&format!("document.querySelector('#one').hidden === {}", fragment.is_empty()));
        for width in [320, 390, 700, 768, 1130, 1360] {
            fits_into(browser, width);
        }
    }
}

/// Gives counters of a document and its parts this value, and the time of their reading.
fn count_up(value: &mut Value, counter: u64, at_ms: u64) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| count_up(item, counter, at_ms)),
        Value::Object(fields) => {
            for (name, field) in fields {
                match name.as_str() {
                    "at_ms" => *field = at_ms.into(),
                    "flows" if field.is_number() => *field = 16_777_216.into(),
                    "speed_mbps" => *field = 400_000.into(),
                    "services" | "backends" | "healthy" if field.is_number() => *field = 100_000.into(),
                    "backends_unhealthy" | "backends_draining" => *field = 40_000.into(),
                    _ if field.is_u64() && !matches!(name.as_str(), "worker" | "flows_limit" | "weight") => {
                        *field = counter.into()
                    }
                    _ => count_up(field, counter, at_ms),
                }
            }
        }
        _ => {}
    }
}

/// Takes the pictures of the documentation, with more traffic than the test needs.
fn take_screenshots(edge: &Edge, browser: &mut Browser, dir: &Path) {
    for server in ["b11", "b12", "b13"] {
        std::fs::write(edge.path(&format!("{server}/picture")), vec![b'x'; 60_000]).unwrap();
    }
    std::fs::write(edge.path("pause.lua"), "function delay() return 20 + math.random(40) end").unwrap();
    let script = edge.path("pause.lua").display().to_string();
    let load = |connections: &str, url: &str| {
        let command = "echo ready; exec wrk -t1 -c $1 -d 260 --timeout 5 -s $2 $3 >/dev/null";
        edge.start_program("client", &["bash", "-c", command, "bash", connections, &script, url]).0
    };
    let urls = [("8", "http://192.0.2.112/picture"), ("10", "http://192.0.2.100/"), ("4", "http://192.0.2.111:443/")];
    let _programs = urls.map(|(connections, url)| load(connections, url));
    browser.open(PAGE);
    std::thread::sleep(Duration::from_secs(185));
    for (name, scheme, size) in
        [("light", "light", (1360, 1180, 1.0)), ("dark", "dark", (1360, 900, 1.0)), ("phone", "light", (390, 844, 2.0))]
    {
        browser.prefer("prefers-color-scheme", scheme);
        browser.resize(size.0, size.1, size.2);
        std::thread::sleep(Duration::from_secs(5));
        browser.screenshot(&dir.join(format!("status-page-{name}.webp")));
    }
}

#[test]
fn a_browser_shows_a_gateway_at_work() {
    let test = "status page in Chromium";
    let Some((program, mut edge)) = browser::installed(test).and_then(|name| Some((name, Edge::with_af_packet(test, "page")?)))
    else {
        return;
    };
    let configuration = std::fs::read_to_string(edge.path("sluice.yaml")).unwrap().replace("name: test\n", "name: edge-1\n");
    std::fs::write(edge.path("sluice.yaml"), configuration).unwrap();
    std::fs::create_dir(edge.path("manifests")).unwrap();
    edge.start();
    let mut browser = Browser::start(program, &edge.namespace("gw"), edge.dir.path());
    browser.resize(1360, 900, 1.0);
    let answers = |edge: &Edge| edge.run("gw", &["curl", "-sf", PAGE]).status.success().then_some(());
    until("the page is served", || answers(&edge));
    an_empty_gateway_says_what_it_waits_for(&mut browser);
    write_services(&edge);
    until("the dead backend is out of use", || edge.service("checkout").filter(|service| service.healthy == 2));
    let _traffic = send_traffic(&edge);
    services_show_rates_and_trouble(&mut browser);
    the_link_shows_those_with_trouble(&mut browser);
    lines_begin_before_the_page(&mut browser);
    the_mouse_opens_a_service_in_the_picture(&mut browser);
    keys_search_open_and_return(&mut browser);
    a_screen_reader_finds_its_way(&mut browser);
    axe_finds_nothing(&mut browser);
    phones_and_dark_rooms_are_served(&mut browser);
    assert!(browser.complaints.is_empty(), "{:?}", browser.complaints);
    if let Some(dir) = std::env::var_os("SLUICE_SCREENSHOTS") {
        take_screenshots(&edge, &mut browser, &PathBuf::from(dir));
    }
    a_silent_gateway_is_reported_until_it_answers(&edge, &mut browser);
    large_figures_fit(&edge, &mut browser);
    many_hostile_services_stay_text(&edge, &mut browser);
}
