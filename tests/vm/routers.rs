//! Steps with a `routed` pool over a card: BIRD or FRR on the gateway's machine, with the configuration that `sluicectl`
//! writes, and the other one as the router on the machine of nodes. BFD finds what fails.

use crate::Step;
use crate::lab::{Kind, Lab, Settings, until};
use crate::world::node;

pub fn steps() -> Vec<Step> {
    vec![
        ("BIRD announces over a card to FRR, and BFD finds a crash and a cable", true, |lab| routed(lab, Daemon::Bird)),
        ("FRR announces over a card to BIRD, and BFD finds a crash and a cable", true, |lab| routed(lab, Daemon::Frr)),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Daemon {
    Bird,
    Frr,
}

const POOLS: &str = "{name: default, addresses: [203.0.113.0/28], announce: routed}";
const ROUTED: &str = "203.0.113.1";

/// The router's configurations. BFD ends a session after 3 s without packets.
const BIRD_ROUTER: &str = "router id 192.0.2.21;
protocol device { }
protocol kernel { ipv4 { import none; export all; }; }
protocol bfd { interface \"*\" { min rx interval 500 ms; min tx interval 500 ms; multiplier 6; }; }
protocol bgp sluice {
  local as 64513; neighbor 192.0.2.2 as 64512;
  bfd on; error wait time 1, 5; connect delay time 1;
  ipv4 { import all; export none; };
}
";
const FRR_ROUTER: &str = "router bgp 64513
 bgp router-id 192.0.2.21
 no bgp ebgp-requires-policy
 neighbor 192.0.2.2 remote-as 64512
 neighbor 192.0.2.2 timers connect 2
 neighbor 192.0.2.2 bfd
 address-family ipv4 unicast
 exit-address-family
exit
";

impl Daemon {
    fn name(self) -> &'static str {
        match self {
            Self::Bird => "bird",
            Self::Frr => "frr",
        }
    }

    fn other(self) -> Self {
        if self == Self::Bird { Self::Frr } else { Self::Bird }
    }

    /// What the gateway's configuration says of it.
    fn announce(self) -> &'static str {
        match self {
            Self::Bird => "announce: {daemon: bird}",
            Self::Frr => "announce: {daemon: frr, routeTable: 254}",
        }
    }

    /// Where its configuration is.
    fn file(self) -> &'static str {
        match self {
            Self::Bird => "/etc/bird/bird.conf",
            Self::Frr => "/etc/frr/frr.conf",
        }
    }

    /// Shell code that starts it anew with its configuration.
    fn start(self) -> &'static str {
        match self {
            Self::Bird => "systemctl restart bird",
            Self::Frr => "sed -i 's/^bgpd=no/bgpd=yes/; s/^bfdd=no/bfdd=yes/' /etc/frr/daemons && systemctl restart frr",
        }
    }

    fn router(self) -> &'static str {
        match self {
            Self::Bird => BIRD_ROUTER,
            Self::Frr => FRR_ROUTER,
        }
    }
}

/// Waits until the router has a route to the VIP, or none.
fn wait_for_route(lab: &mut Lab, is_there: bool, when: &str) {
    let via = "ip route show 203.0.113.1 | grep -q 'via 192.0.2.2'";
    let code = if is_there { via.to_owned() } else { format!("! {via}") };
    let what = format!("the router has {} route {when}", if is_there { "a" } else { "no" });
    lab.world().until(&what, &code);
}

fn routed(lab: &mut Lab, daemon: Daemon) {
    node(lab);
    let ports = Kind::first().ports();
    lab.apply(&Settings { pools: POOLS, more: daemon.announce(), ..Settings::of(&ports) });
    let text = include_str!("echo.yaml").replace("192.0.2.110,2001:db8::1:10", ROUTED).replace("name: echo", "name: routed");
    let text = text.replace("RequireDualStack", "SingleStack").replace("[IPv4, IPv6]", "[IPv4]");
    lab.gateway().write("/etc/sluice/manifests/routed.yaml", &text);
    let router = daemon.other();
    lab.world().write(router.file(), router.router());
    lab.world().succeed(router.start());
    let command = "--local-as 64512 --peer 192.0.2.21=64513 --bfd --bfd-interval 500 --bfd-multiplier 6";
    let file = daemon.file();
    lab.gateway().succeed(&format!("sluicectl config {} {command} >{file} && {}", daemon.name(), daemon.start()));
    wait_for_route(lab, true, "at first");
    let answers = |lab: &mut Lab, when: &str| {
        let code = format!("curl -sf --max-time 20 http://{ROUTED}/");
        let server = lab.world().until(&format!("the routed VIP answers {when}"), &code);
        assert!(["b11", "b12", "b13"].contains(&server.trim()), "{server}");
    };
    answers(lab, "at first");
    let wanted = ["bgp 192.0.2.21 up", "bfd 192.0.2.21 up"];
    let sessions = |lab: &mut Lab| -> Option<Vec<String>> {
        let gateways = lab.table_if_any("gateways")?;
        let row = |session: &serde_json::Value| {
            ["protocol", "peer", "status"].map(|key| session[key].as_str().unwrap().to_owned()).join(" ")
        };
        Some(gateways[0]["sessions"].as_array()?.iter().map(row).collect())
    };
    until("the gateway shows both sessions", || {
        sessions(lab).filter(|shown| wanted.iter().all(|row| shown.iter().any(|s| s == row)))
    });
    // The routing daemon lives on; its packets end with the worker.
    lab.gateway().succeed("systemctl kill -s KILL sluiced; systemctl stop sluiced");
    wait_for_route(lab, false, "after the gateway was killed");
    lab.gateway().succeed("systemctl start sluiced");
    lab.wait_until_ready();
    wait_for_route(lab, true, "after the gateway is back");
    answers(lab, "after the gateway is back");
    lab.gateway().set_link(Kind::first().index(), false);
    wait_for_route(lab, false, "after the cable was pulled");
    until("the gateway shows that its session is down", || {
        sessions(lab).filter(|shown| shown.iter().any(|row| row == "bfd 192.0.2.21 down"))
    });
    lab.gateway().set_link(Kind::first().index(), true);
    wait_for_route(lab, true, "after the cable was put in");
    answers(lab, "after the cable was put in");
    lab.gateway().succeed(&format!("systemctl stop {}; rm /etc/sluice/manifests/routed.yaml", daemon.name()));
    lab.world().succeed(&format!("systemctl stop {}", router.name()));
    lab.use_card(Kind::first(), "");
    lab.assert_serves();
}
