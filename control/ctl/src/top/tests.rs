//! Tests: the screen as text, and what keys and samples do to it.
//!
//! With `SLUICE_WRITE_SCREENS=1` the screens in `screens/` are written anew; look at the difference before you commit it.

use std::path::PathBuf;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use proto::v1;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color;

use super::columns::View;
use super::model::Connection;
use super::sample::{FlowQuery, FlowSample, HeaviestSample};
use super::*;

/// 14:03:20, in seconds since 1970.
const NOON_S: u64 = 1_700_057_000;

fn backend(service: &str, address: &str, n: u64, round: u64) -> v1::BackendStatus {
    let traffic = v1::BackendTraffic {
        packets_to_backend: round * round * n * 100,
        packets_to_clients: round * n * 80,
        bytes_to_backend: round * n * 10_000,
        bytes_to_clients: round * n * 1_000_000,
        new_flows: round * n * 7,
        failed_connections: round,
        reset_connections: 0,
    };
    v1::BackendStatus {
        service: service.into(),
        address: address.into(),
        state: "active".into(),
        healthy: true,
        weight: 1,
        flows: n * 1_000,
        gateway: "edge-1".into(),
        reason: String::new(),
        traffic: Some(traffic),
        protocol: "tcp".into(),
        ..Default::default()
    }
}

fn service(name: &str, backends: u32, healthy: u32) -> v1::ServiceStatus {
    v1::ServiceStatus {
        namespace: "demo".into(),
        name: name.into(),
        frontends: vec![
            format!("tcp 192.0.2.100:{}", 80 + name.len()),
            "tcp [2001:db8::1:0]:80".into(),
            "udp 192.0.2.100:53".into(),
        ],
        mode: "nat".into(),
        scheduler: "maglev".into(),
        backends,
        healthy,
        gateway: "edge-1".into(),
        ..Default::default()
    }
}

fn account(worker: u32, round: u64) -> v1::Account {
    v1::Account {
        worker,
        received: round * 1_250,
        transmitted: round * 1_200,
        dropped: round * 50,
        flows: 8_000,
        flows_max: 16_384,
        cycles: round * 3_000_000_000,
        busy_cycles: round * 1_290_000_000,
        stalled: worker == 1,
        ..Default::default()
    }
}

/// The sample of a gateway after `round` seconds.
fn sample(round: u64) -> Sample {
    let refused = v1::ServiceStatus {
        reason: "Refused".into(),
        message: "no SNAT address of family IPv6".into(),
        ..service("sticky", 0, 0)
    };
    let web = v1::ServiceStatus { drops: [("source_range".to_owned(), round * 12)].into(), ..service("web", 2, 2) };
    let failing = v1::BackendStatus {
        healthy: false,
        reason: "GET http://10.0.0.13:8080/healthz answered 500, expected 200-399".into(),
        ..backend("demo/api", "10.0.0.13:8080", 0, round)
    };
    let draining = v1::BackendStatus { state: "draining".into(), ..backend("demo/api", "[fd00::14]:8080", 2, round) };
    let drop = |reason: &str, packets| v1::DropCount { reason: reason.into(), worker: 0, packets, gateway: "edge-1".into() };
    let port = v1::PortStatus {
        name: "uplink".into(),
        device: "0000:3b:00.0".into(),
        link: "up".into(),
        rx_packets: round * 1_250,
        tx_packets: round * 1_200,
        rx_bytes: round * 1_000_000,
        tx_bytes: round * 900_000,
        steering: "RSS".into(),
        gateway: "edge-1".into(),
        ..Default::default()
    };
    Sample {
        at: Duration::from_secs(round),
        status: v1::GetStatusResponse {
            gateway: "edge-1".into(),
            version: "0.1.0".into(),
            generation: Some(v1::Generation { epoch: "1700".into(), counter: 42 }),
            ready: true,
            controller_connected: true,
            accounts: vec![account(0, round), account(1, round)],
            ..Default::default()
        },
        services: vec![service("api", 2, 1), refused, web],
        backends: vec![
            backend("demo/api", "10.0.0.12:8080", 3, round),
            failing,
            draining,
            backend("demo/web", "10.0.0.11:8080", 1, round),
            backend("demo/web", "10.0.0.12:8080", 2, round),
        ],
        drops: vec![drop("malformed", 0), drop("no_flow", round * 5), drop("source_range", 12)],
        ports: vec![port],
        gateways_refusal: Some("this gateway follows the controller at unix:/c.sock, which alone knows this".into()),
        ..Default::default()
    }
}

fn flows(model: &Model) -> FlowSample {
    let flow = |n: u32, state: &str| v1::FlowStatus {
        protocol: "tcp".into(),
        client: format!("198.51.100.7:{}", 40_000 + n),
        frontend: "192.0.2.100:83".into(),
        backend: "10.0.0.12:8080".into(),
        mode: "nat".into(),
        state: state.into(),
        age_s: (100 * n).into(),
        idle_s: n.into(),
        service: "demo/api".into(),
        snat: "10.0.0.3:1024".into(),
        ..Default::default()
    };
    let rows = vec![flow(1, "established"), flow(2, "half_closed_by_backend")];
    FlowSample { query: model.flows_needed().unwrap(), rows, is_cut: true, refusal: None }
}

/// Two flows, and the clients of them.
fn heaviest() -> HeaviestSample {
    let client = |address: &str, mbit_per_s: u64| v1::HeavyTraffic {
        client: address.into(),
        service: "demo/api".into(),
        packets_per_second: 100 * mbit_per_s,
        bits_per_second: 1_000_000 * mbit_per_s,
        samples: 40 * mbit_per_s,
        ..Default::default()
    };
    let flow = |address: &str, mbit_per_s| v1::HeavyTraffic {
        protocol: "tcp".into(),
        frontend: "192.0.2.100:83".into(),
        backend: "10.0.0.12:8080".into(),
        ..client(address, mbit_per_s)
    };
    let rows = vec![
        flow("198.51.100.7:40001", 30),
        flow("198.51.100.7:40002", 12),
        client("198.51.100.7", 42),
        v1::HeavyTraffic { service: String::new(), ..client("198.51.100.8", 2) },
    ];
    HeaviestSample { rows, refusal: None }
}

/// A screen after 20 samples.
fn model() -> Model {
    let mut model = Model::new(sample(1));
    model.resize(24);
    (2..=20).for_each(|round| model.answered(Ok(sample(round)), NOON_S));
    model
}

fn press(model: &mut Model, keys: &[KeyCode]) -> Action {
    let press = |key: &KeyCode| model.press(KeyEvent::new(*key, KeyModifiers::NONE));
    keys.iter().map(press).last().unwrap()
}

fn typed(text: &str) -> Vec<KeyCode> {
    text.chars().map(KeyCode::Char).collect()
}

fn drawn(model: &mut Model, width: u16, height: u16, has_colours: bool) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    model.resize(height);
    let look = Look { has_colours, delay: Duration::from_secs(1) };
    terminal.draw(|frame| draw(frame, model, look, Duration::from_secs(NOON_S))).unwrap();
    terminal
}

fn text(model: &mut Model, width: u16, height: u16) -> String {
    let terminal = drawn(model, width, height, true);
    let buffer = terminal.backend().buffer();
    let cell = |x, y| buffer[(x, y)].symbol().to_owned();
    let line = |y| (0..width).map(|x| cell(x, y)).collect::<String>().trim_end().to_owned() + "\n";
    (0..height).map(line).collect()
}

/// Compares with the file, or writes it.
fn assert_screen(model: &mut Model, width: u16, height: u16, name: &str) {
    let drawn = text(model, width, height);
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("src/top/screens/{name}-{width}x{height}.txt"));
    if std::env::var_os("SLUICE_WRITE_SCREENS").is_some() {
        std::fs::write(&path, &drawn).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(drawn, expected, "{}; drawn:\n{drawn}", path.display());
}

#[test]
fn each_view_is_drawn_on_a_small_and_a_large_terminal() {
    for (number, view) in (1..).zip(View::ALL) {
        let mut model = model();
        let digit = char::from_digit(number, 10).unwrap();
        press(&mut model, &[KeyCode::Char(digit), KeyCode::Home]);
        if view == View::Flows {
            let flows = flows(&model);
            model.answered(Ok(Sample { flows: Some(flows), ..sample(21) }), NOON_S);
        }
        if view == View::Heaviest {
            assert!(model.wanted().heaviest && model.lacks_rows() && text(&mut model, 80, 24).contains("Looking at packets"));
            model.answered(Ok(Sample { heaviest: Some(heaviest()), ..sample(21) }), NOON_S);
            assert!(!model.lacks_rows());
        }
        for (width, height) in [(80, 24), (120, 40)] {
            assert_screen(&mut model, width, height, &view.title().to_lowercase());
        }
    }
}

#[test]
fn names_that_differ_at_their_ends_stay_apart_on_a_small_terminal() {
    let names = ["checkout-frontend-of-the-shop-blue", "checkout-frontend-of-the-shop-green"];
    let mut model = model();
    model.answered(Ok(Sample { services: names.map(|name| service(name, 1, 1)).into(), ..sample(21) }), NOON_S);
    press(&mut model, &[KeyCode::Char('1')]);
    let screen = text(&mut model, 80, 24);
    for end in ["op-blue ", "p-green "] {
        assert!(screen.lines().any(|line| line.starts_with("demo/che") && line.contains(end)), "{end}:\n{screen}");
    }
}

#[test]
fn dialogs_and_a_service_with_its_backends_are_drawn() {
    let mut model = model();
    press(&mut model, &[KeyCode::Home, KeyCode::Enter, KeyCode::End]);
    assert_screen(&mut model, 80, 24, "service");
    press(&mut model, &[KeyCode::F(6)]);
    assert_screen(&mut model, 80, 24, "sort");
    press(&mut model, &[KeyCode::Esc, KeyCode::F(1)]);
    assert_screen(&mut model, 80, 24, "help");
    assert_eq!(press(&mut model, &[KeyCode::Char('q')]), Action::Nothing, "it closes the page");
    press(&mut model, &[KeyCode::F(4)]);
    press(&mut model, &typed("fd00"));
    assert_screen(&mut model, 80, 24, "filter");
}

#[test]
fn without_an_answer_the_last_figures_stay_and_the_screen_says_since_when() {
    let mut model = model();
    let error = || Err("found no socket /run/sluice/admin.sock; is its program running here?".to_owned());
    model.answered(error(), NOON_S - 75);
    model.answered(error(), NOON_S - 5);
    assert_screen(&mut model, 80, 24, "disconnected");
    assert_eq!(model.figures.services.len(), 3);
    // The gateway began again: its counters do not make rates.
    model.answered(Ok(Sample { at: Duration::from_secs(90), ..sample(1) }), NOON_S);
    assert_eq!((&model.connection, model.figures.totals.traffic.packets), (&Connection::Answered, None));
    model.answered(Ok(Sample { at: Duration::from_secs(91), ..sample(2) }), NOON_S);
    assert!(model.figures.totals.traffic.packets.is_some());
}

#[test]
fn rates_of_a_service_are_those_of_its_backends() {
    let model = model();
    let of = |name: &str| model.figures.services.iter().find(|service| service.name == name).unwrap();
    // In the last second 39 * n * 100 packets to a backend and 80 * n back; n is 3, 0 and 2.
    assert_eq!(of("demo/api").traffic.packets, Some(5.0 * (3_900.0 + 80.0)));
    assert_eq!(of("demo/api").traffic.bits, Some(5.0 * 8.0 * 1_010_000.0));
    assert_eq!((of("demo/web").drops, of("demo/web").traffic.flows), (Some(12.0), 3_000));
    assert_eq!((of("demo/api").state, of("demo/sticky").state, of("demo/web").state), ("degraded", "refused", "ok"));
    assert_eq!(model.figures.totals.traffic.new_flows, Some(8.0 * 7.0));
    assert_eq!((model.figures.workers[0].busy, model.figures.totals.drops), (Some(0.43), Some(5.0)));
}

#[test]
fn what_an_older_gateway_does_not_tell_is_unknown_not_zero() {
    let without = |round| {
        let mut sample = sample(round);
        sample.backends.iter_mut().for_each(|backend| backend.traffic = None);
        sample
    };
    let mut model = Model::new(without(1));
    model.answered(Ok(without(2)), NOON_S);
    assert_eq!((model.figures.totals.traffic.packets, model.figures.totals.traffic.flows), (None, 8_000));
    assert!(text(&mut model, 80, 24).contains("Pkt/s -"));
}

/// The names of the rows that are shown, and the selected one.
fn rows(model: &Model) -> (Vec<String>, String) {
    let name = |row: &usize| model.table().value(*row, 0).text(0).into_owned();
    (model.order.iter().map(name).collect(), model.order.get(model.selected).map(name).unwrap_or_default())
}

#[test]
fn keys_sort_invert_and_keep_the_selected_row() {
    let mut model = model();
    assert_eq!(rows(&model).0, ["demo/api", "demo/web", "demo/sticky"], "by packets, the highest first");
    press(&mut model, &[KeyCode::Down]);
    assert_eq!(rows(&model).1, "demo/web");
    press(&mut model, &[KeyCode::Char('I')]);
    assert_eq!(rows(&model), (["demo/sticky", "demo/web", "demo/api"].map(str::to_owned).into(), "demo/web".to_owned()));
    press(
        &mut model,
        &[KeyCode::F(6), KeyCode::Up, KeyCode::Up, KeyCode::Up, KeyCode::Up, KeyCode::Up, KeyCode::Up, KeyCode::Enter],
    );
    assert_eq!(rows(&model), (["demo/api", "demo/sticky", "demo/web"].map(str::to_owned).into(), "demo/web".to_owned()));
    press(&mut model, &[KeyCode::Char('>'), KeyCode::Char('>')]);
    assert_eq!(rows(&model).0[0], "demo/api", "by backends that are not up");
    press(&mut model, &[KeyCode::Char('<'), KeyCode::Char('<'), KeyCode::Char('<')]);
    assert_eq!(model.table().column(model.sort().column).0, "MODE", "from the first to the last");
}

#[test]
fn keys_search_and_filter() {
    let mut model = model();
    press(&mut model, &[KeyCode::Char('/')]);
    press(&mut model, &typed("STICK"));
    assert_eq!((rows(&model).0.len(), rows(&model).1), (3, "demo/sticky".to_owned()));
    press(&mut model, &[KeyCode::Backspace, KeyCode::Enter, KeyCode::Home]);
    press(&mut model, &typed("n"));
    assert_eq!(rows(&model).1, "demo/sticky");
    press(&mut model, &[KeyCode::Char('\\')]);
    press(&mut model, &typed("refused"));
    assert_eq!(rows(&model).0, ["demo/sticky"]);
    press(&mut model, &typed("x"));
    assert!(text(&mut model, 80, 24).contains("No row has this text"));
    press(&mut model, &[KeyCode::Esc]);
    assert_eq!((rows(&model).0.len(), &model.filter), (3, &String::new()), "given up");
    press(&mut model, &[KeyCode::F(4), KeyCode::Char('w'), KeyCode::Enter, KeyCode::Esc]);
    assert_eq!(rows(&model).0.len(), 3, "removed");
}

#[test]
fn enter_opens_backends_then_flows_and_escape_goes_back() {
    let mut model = model();
    press(&mut model, &[KeyCode::Home, KeyCode::Enter]);
    assert_eq!(rows(&model).0, ["10.0.0.12:8080", "[fd00::14]:8080", "10.0.0.13:8080"]);
    assert_eq!(press(&mut model, &[KeyCode::Enter]), Action::Refresh, "flows are asked for at once");
    let query = FlowQuery { service: "demo/api".into(), backend: "10.0.0.12:8080".into() };
    assert_eq!((model.flows_needed(), model.lacks_rows()), (Some(query), true));
    // A sample that was on its way does not have them.
    model.answered(Ok(sample(21)), NOON_S);
    assert!(model.lacks_rows() && text(&mut model, 80, 24).contains("Asking for flows"));
    let found = flows(&model);
    model.answered(Ok(Sample { flows: Some(found.clone()), ..sample(22) }), NOON_S);
    assert_eq!((model.lacks_rows(), rows(&model).0.len()), (false, 2));
    press(&mut model, &[KeyCode::Esc]);
    assert_eq!((model.view, rows(&model).1), (View::Backends, "10.0.0.12:8080".to_owned()));
    press(&mut model, &[KeyCode::Esc]);
    assert_eq!((model.view, rows(&model).0.len()), (View::Services, 3));
    press(&mut model, &[KeyCode::Down, KeyCode::Char('f')]);
    model.answered(Ok(Sample { flows: Some(found), ..sample(23) }), NOON_S);
    assert!(model.lacks_rows(), "those are of another Service");
    let refused =
        FlowSample { query: model.flows_needed().unwrap(), refusal: Some("ask a gateway".into()), ..FlowSample::default() };
    model.answered(Ok(Sample { flows: Some(refused), ..sample(24) }), NOON_S);
    assert!(!model.lacks_rows() && text(&mut model, 80, 24).contains("ask a gateway"));
}

#[test]
fn a_pause_keeps_the_figures_until_it_ends_or_a_sample_is_asked_for() {
    let mut model = model();
    press(&mut model, &[KeyCode::Char(' ')]);
    let before = model.figures.totals.traffic.packets;
    model.answered(Ok(sample(21)), NOON_S);
    assert_eq!(model.figures.totals.traffic.packets, before);
    assert!(text(&mut model, 80, 24).contains("PAUSED"));
    assert_eq!(press(&mut model, &[KeyCode::F(5)]), Action::Refresh);
    model.answered(Ok(sample(22)), NOON_S);
    // Over two seconds: the counters of the pause were not seen.
    assert_ne!(model.figures.totals.traffic.packets, before);
    press(&mut model, &[KeyCode::Char(' ')]);
    model.answered(Ok(sample(23)), NOON_S);
    assert!(model.figures.totals.traffic.packets.is_some());
}

#[test]
fn a_thousand_rows_scroll_by_pages() {
    let mut many = sample(1);
    many.services = (0..1_000).map(|n| service(&format!("s{n:03}"), 0, 0)).collect();
    let mut model = Model::new(many);
    model.resize(24);
    press(&mut model, &[KeyCode::PageDown, KeyCode::PageDown]);
    assert_eq!((model.selected, model.first, rows(&model).1.as_str()), (30, 16, "demo/s030"));
    press(&mut model, &[KeyCode::End]);
    assert_eq!((model.selected, model.first), (999, 985));
    press(&mut model, &[KeyCode::PageUp]);
    assert_eq!((model.selected, model.first), (984, 984));
    // Of the last page all rows are shown.
    press(&mut model, &[KeyCode::End]);
    assert!(text(&mut model, 80, 24).contains("demo/s999") && text(&mut model, 80, 24).contains("demo/s985"));
    model.answered(Ok(sample(2)), NOON_S);
    assert_eq!((model.selected, model.first), (2, 0), "most of them are gone");
    model.answered(Ok(Sample { services: Vec::new(), ..sample(3) }), NOON_S);
    press(&mut model, &[KeyCode::Down, KeyCode::Enter, KeyCode::Char('f'), KeyCode::PageUp, KeyCode::Char('n')]);
    assert!(text(&mut model, 80, 24).contains("No services."));
}

#[test]
fn every_size_is_drawn_and_a_small_one_says_what_is_needed() {
    let mut model = model();
    for (width, height) in [(1, 1), (20, 5), (59, 40), (200, 11)] {
        let drawn = text(&mut model, width, height);
        assert!(width < 20 || drawn.contains(&format!("{width}x{height}")), "{drawn}");
    }
    for (width, height) in [(60, 12), (79, 23), (300, 100)] {
        for digit in '1'..='8' {
            for key in [KeyCode::Null, KeyCode::F(6), KeyCode::F(1), KeyCode::F(4)] {
                press(&mut model, &[KeyCode::Char(digit), key]);
                text(&mut model, width, height);
                press(&mut model, &[KeyCode::Esc]);
            }
        }
    }
}

#[test]
fn without_colours_the_same_text_is_drawn_and_nothing_has_a_colour() {
    let mut model = model();
    let (plain, coloured) = (drawn(&mut model, 80, 24, false), drawn(&mut model, 80, 24, true));
    let symbols = |terminal: &Terminal<TestBackend>| {
        terminal.backend().buffer().content().iter().map(|cell| cell.symbol().to_owned()).collect::<String>()
    };
    assert_eq!(symbols(&plain), symbols(&coloured));
    assert!(plain.backend().buffer().content().iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
    assert!(coloured.backend().buffer().content().iter().any(|cell| cell.fg == Color::Red));
}
