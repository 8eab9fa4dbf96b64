// The page: asks for the document, and shows it. What is shown is in the fragment of the URL, so that Back works.

const EVERY_MS = 2000, PATIENCE_MS = 5000, STEP = 50;

const rates = new Rates();
const view = { search: "", sort: "rate", only: "", limit: STEP, service: null };
const live = { document: null, heardAt: 0, trouble: "", paused: false, timer: 0, asking: null, asked: "", known: "" };

const at = () => live.document.at_ms;
const columns = {
  services: serviceColumns(rates, at, (name) => go({ service: name })),
  members: memberColumns(rates, at, () => view.service),
  workers: workerColumns(rates, at),
  drops: dropColumns(rates, at),
  ports: portColumns(rates, at),
};

function readFragment() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  view.search = fragment.get("search") || "";
  view.sort = ["rate", "trouble", "name"].includes(fragment.get("sort")) ? fragment.get("sort") : "rate";
  view.only = fragment.get("only") === "trouble" ? "trouble" : "";
  view.service = fragment.get("service");
}

/** Changes what is shown; typing replaces the entry of the history instead of adding one. */
function go(change, replaces = false) {
  Object.assign(view, change);
  history[replaces ? "replaceState" : "pushState"](null, "", fragmentOf(view));
  shownChanged();
}

/** The URL of a view. */
function fragmentOf({ search, sort, only, service }) {
  const fragment = new URLSearchParams();
  if (search) fragment.set("search", search);
  if (sort !== "rate") fragment.set("sort", sort);
  if (only) fragment.set("only", only);
  if (service) fragment.set("service", service);
  return fragment.size ? `#${fragment}` : location.pathname;
}

let focusAfter = null;

function shownChanged() {
  const search = byId("search");
  if (document.activeElement !== search) search.value = view.search;
  for (const radio of byId("sort").querySelectorAll("input")) radio.checked = radio.value === view.sort;
  const opened = view.service !== (byId("one").dataset.name || null);
  if (opened) focusAfter = view.service ? null : byId("one").dataset.name;
  byId("one").dataset.name = view.service || "";
  byId("one").hidden = !view.service;
  byId("list").hidden = Boolean(view.service);
  byId("back").hidden = !view.service;
  byId("all").hidden = !view.only;
  set(byId("path-title"), { text: view.service || "Traffic", class: view.service ? "name-of-one" : null });
  if (live.document) show();
  if (opened && view.service) byId("path-title").focus();
  ask();
}

async function ask() {
  clearTimeout(live.timer);
  if (live.asking) live.asking.abort();
  const asking = live.asking = new AbortController();
  const patience = setTimeout(() => asking.abort("late"), PATIENCE_MS);
  const parameters = new URLSearchParams({ sort: view.sort, limit: view.limit });
  if (view.search) parameters.set("search", view.search);
  if (view.only) parameters.set("only", view.only);
  if (view.service) parameters.set("service", view.service);
  try {
    const response = await fetch(`status.json?${parameters}`, { signal: asking.signal, cache: "no-store" });
    if (!response.ok) throw new Error(`${response.status}: ${(await response.text()).trim()}`);
    const document_ = await response.json();
    if (asking !== live.asking) return;
    const began = live.document && (document_.at_ms < live.document.at_ms || document_.gateway !== live.document.gateway);
    if (began) rates.clear();
    Object.assign(live, { document: document_, heardAt: Date.now(), trouble: "" });
    rates.next();
    show();
  } catch (error) {
    if (asking !== live.asking) return;
    live.trouble = asking.signal.reason === "late" || error instanceof TypeError ? "No answer from the gateway" : String(error.message);
  } finally {
    clearTimeout(patience);
  }
  showNotice();
  if (!live.paused && !document.hidden) live.timer = setTimeout(ask, EVERY_MS);
}

function show() {
  const document_ = live.document, { totals } = document_;
  showState(document_);
  fillFigures(byId("figures"), document_, rates);
  fillTable(byId("workers"), columns.workers, document_.workers, (worker) => worker.worker);
  const drops = Object.entries(document_.drops).map(([reason, number]) => ({ reason, packets: number }));
  drops.sort((a, b) => b.packets - a.packets);
  fillTable(byId("drops"), columns.drops, drops, (drop) => drop.reason);
  set(byId("drops-note"), { text: drops.length ? "" : "Nothing was dropped." });
  fillTable(byId("heaviest-flows"), heavyFlowColumns, document_.heaviest_flows, (flow) => `${flow.protocol} ${flow.client} ${flow.frontend}`);
  fillTable(byId("heaviest-clients"), heavyClientColumns, document_.heaviest_clients, (client) => client.client);
  set(byId("heaviest-note"), { text: document_.heaviest_clients.length ? "" : "No packet of a flow in the last second." });
  fillTable(byId("ports"), columns.ports, document_.ports, (port) => port.name);
  byId("troubles-box").hidden = document_.troubles.length === 0;
  fillTable(byId("troubles"), troubleColumns, document_.troubles, (trouble) => `${trouble.kind} ${trouble.object}`);
  const failed = document_.tasks.filter((task) => task.restarts > 0);
  byId("tasks-box").hidden = failed.length === 0;
  fillTable(byId("tasks"), taskColumns, failed, (task) => task.name);
  const { events } = document_;
  fillEvents(byId("events"), events);
  const none = document_.events_missing || (view.service ? "No event about it is kept." : view.search ? "None of the newest events is about it." : "No events yet.");
  set(byId("events-note"), { text: events.length ? "" : none });
  if (view.service) showOne(document_.service);
  else showList(document_);
  showPicture(document_, totals);
  letScrolledBeReached();
  set(byId("about"), { text: `sluice ${document_.version} · state ${whole(document_.generation)} · up ${duration(document_.at_ms / 1000)} · read-only, as sluicectl shows it` });
}

/** What can be scrolled can be reached by keyboard. */
function letScrolledBeReached() {
  for (const area of document.querySelectorAll(".scroll, #events, pre")) {
    set(area, { tabindex: area.scrollWidth > area.clientWidth || area.scrollHeight > area.clientHeight ? "0" : null });
  }
}

function showState(document_) {
  const word = document_.draining ? "Draining" : document_.ready ? "Forwarding" : "Not ready";
  const trouble = document_.totals.services_with_trouble;
  const use = document_.state_expired ? "only nodes are used of the last state" : "the last state stays in use";
  const alone = document_.controller_connected ? "" : ` · no controller: ${use}`;
  const state = byId("state");
  const onlyTrouble = (event) => {
    event.preventDefault();
    go({ only: "trouble", service: null, search: "" });
  };
  if (!state.firstChild) state.append(make("b"), make("span"), make("span", {}, [" · ", make("a", { class: "bad", on: { click: onlyTrouble } })]), make("span"), make("span"));
  set(state.children[0], { text: word, class: document_.ready ? null : "bad" });
  set(state.children[1], { text: ` · ${count(document_.totals.services, "Service", "Services")}` });
  set(state.children[2], { hidden: trouble ? null : "" });
  set(state.children[2].lastChild, { text: `${whole(trouble)} with trouble`, href: fragmentOf({ search: "", sort: view.sort, only: "trouble", service: null }) });
  set(state.children[3], { text: fleetText(document_.fleet) });
  set(state.children[4], { text: alone });
  set(byId("gateway"), { text: document_.gateway });
  document.title = `${document_.totals.services_with_trouble ? `(${document_.totals.services_with_trouble}) ` : ""}${document_.gateway} · sluice`;
}

function fleetText({ groups, groups_owned, partners, partners_in_sync, sessions, sessions_up }) {
  const parts = [];
  if (groups) parts.push(`owns ${groups_owned} of ${groups} groups of VIPs`);
  if (partners) parts.push(`${partners_in_sync} of ${count(partners, "partner", "partners")} in sync`);
  if (sessions) parts.push(`${sessions_up} of ${count(sessions, "routing session", "routing sessions")} up`);
  return parts.map((part) => ` · ${part}`).join("");
}

function showList(document_) {
  const { services, matched, totals } = document_;
  fillTable(byId("services"), columns.services, services, (service) => service.name);
  if (focusAfter) {
    for (const button of byId("services").querySelectorAll("td button")) if (button.textContent === focusAfter) button.focus();
    focusAfter = null;
  }
  const all = count(totals.services, "Service", "Services");
  const of = view.search ? `${whole(matched)} of ${all} match` : view.only ? `${whole(matched)} of ${all} with trouble` : all;
  set(byId("list-note"), { text: services.length < matched ? `${whole(services.length)} shown · ${of}` : of });
  byId("more").hidden = services.length >= matched || view.limit >= 500;
  const nothing = byId("nothing");
  const kind = services.length ? "" : view.search ? "search" : view.only ? "well" : "empty";
  if (nothing.dataset.kind === kind + view.search) return;
  nothing.dataset.kind = kind + view.search;
  nothing.replaceChildren();
  if (kind === "search") {
    nothing.append(make("h3", { text: `Nothing matches “${view.search}”` }), make("p", { text: "The search compares names, frontends, addresses of backends and reasons." }),
      make("button", { type: "button", text: "Clear the search", on: { click: () => go({ search: "" }) } }));
  } else if (kind === "well") {
    nothing.append(make("h3", { text: "No Service has trouble" }),
      make("button", { type: "button", text: "Show all Services", on: { click: () => go({ only: "" }) } }));
  } else if (kind === "empty") {
    nothing.append(make("h3", { text: "No Services yet" }),
      make("p", { text: "The gateway waits for a Service of type LoadBalancer with its class. Once one has an address, it shows here within seconds." }),
      make("pre", { tabindex: "0", text: "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  type: LoadBalancer\n  loadBalancerClass: sluice.dev/gateway\n  selector: {app: web}\n  ports: [{port: 80, targetPort: 8080}]" }));
  }
}

function showOne(service) {
  const reason = !service ? "This Service is not served by this gateway: it was deleted, or never had an address." : service.reason ? `${service.reason}: ${service.message}` : "";
  set(byId("one-reason"), { text: reason, class: service ? "bad" : "note" });
  const facts = service ? [
    ["Frontends", service.frontends.join(", ") + (service.frontends_total > service.frontends.length ? ` and ${service.frontends_total - service.frontends.length} more` : "")],
    ["Mode", service.mode], ["Scheduler", service.scheduler], ["Sends to", service.target === "node" ? "nodes" : "endpoints"],
    ["Backends", healthWord(service)], ["Flows", whole(service.flows)],
    ["Connections failed", whole(service.failed_connections)], ["Connections reset", whole(service.reset_connections)],
  ] : [];
  keep(byId("one-facts"), facts, ([name]) => name, () => make("div", {}, [make("dt"), make("dd")]), (element, [name, value]) => {
    set(element.children[0], { text: name });
    set(element.children[1], { text: value || "–", class: name === "Frontends" ? "mono" : null });
  });
  fillTable(byId("members"), columns.members, service ? service.members : [], (member) => `${member.protocol} ${member.address}`);
  const rest = service ? service.members_total - service.members.length : 0;
  set(byId("members-note"), { text: rest > 0 ? `${count(rest, "backend is", "backends are")} not shown; those with trouble and with most flows are.` : "" });
}

/** Packets a second from and to clients: of these Services, or of all. */
function clientRates(services, totals, ms) {
  const of = (key, name) => services
    ? services.map((service) => rates.of(`${service.name} ${name}`, service[key], ms)).reduce(sum, 0)
    : rates.of(name, totals[key], totals.at_ms);
  const out = of("packets_to_backends", "out"), back = of("packets_to_clients", "back");
  return { out, back, all: sum(out, back) };
}

function showPicture(document_, totals) {
  const shown = view.service ? [document_.service].filter(Boolean) : document_.picture;
  const box = byId("path");
  box.hidden = shown.length === 0 && !view.service;
  set(byId("picture"), { hidden: shown.length ? null : "" });
  if (shown.length === 0) return;
  const most = view.service ? 24 : 4;
  const services = shown.map((service) => drawn({ ...service, members: service.members.slice(0, most) }, rates, document_.at_ms));
  const remaining = { count: view.service ? 0 : document_.matched - shown.length, rate: 0 };
  const isPart = view.search !== "" || view.only !== "";
  const clients = clientRates(view.service || isPart ? shown : null, totals, document_.at_ms);
  if (remaining.count > 0 && !isPart) remaining.rate = services.reduce((rest, service) => Math.max(0, rest - (service.rate || 0)), clients.all || 0);
  const picture = byId("picture");
  // It has no width until it is laid out; then the observer calls again.
  const width = Math.floor(picture.getBoundingClientRect().width);
  if (width >= NARROWEST) drawPicture(picture, width, services, clients, remaining, view.service ? null : (name) => go({ service: name }));
  set(byId("path-note"), { text: view.service ? "a wider line carries more packets" : "clients, Services, backends · trouble first, then the busiest · a wider line carries more packets" });
}

function showNotice() {
  const notice = byId("notice");
  const silence = live.heardAt ? Date.now() - live.heardAt : 0;
  const stale = live.trouble !== "" && (silence > 2 * EVERY_MS || !live.document);
  document.body.classList.toggle("stale", stale && live.document !== null);
  let text = "";
  if (live.trouble && live.trouble !== "No answer from the gateway") text = live.trouble;
  else if (stale) text = live.document ? "No answer from the gateway. The figures are the last ones it gave; the page keeps asking." : "No answer from the gateway; the page keeps asking.";
  else if (live.paused) text = "Paused: the figures stand still.";
  else if (live.document && !live.document.ready) text = "The gateway has no complete state yet; sluicectl status and the log say why.";
  set(notice, { text, class: live.paused && !stale ? "calm" : null });
}

byId("pause").onclick = () => {
  live.paused = !live.paused;
  set(byId("pause"), { "aria-pressed": String(live.paused), text: live.paused ? "Resume" : "Pause" });
  if (live.paused) {
    clearTimeout(live.timer);
    showNotice();
  } else ask();
};
byId("back").onclick = () => go({ service: null });
byId("all").onclick = () => {
  go({ only: "" });
  byId("list").focus();
};
byId("more").onclick = () => {
  view.limit = Math.min(500, view.limit < 100 ? 100 : view.limit + 100);
  ask();
};
byId("sort").onchange = (event) => go({ sort: event.target.value, limit: STEP }, true);
let typing = 0;
byId("search").oninput = () => {
  clearTimeout(typing);
  typing = setTimeout(() => go({ search: byId("search").value.trim(), limit: STEP, service: null }, true), 200);
};
document.querySelector("form").onsubmit = (event) => event.preventDefault();
document.onkeydown = (event) => {
  const inField = event.target.matches("input[type=search]");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !inField) {
    event.preventDefault();
    byId("search").focus();
    byId("search").select();
  } else if (event.key === "Escape" && inField && byId("search").value) {
    event.preventDefault();
    byId("search").value = "";
    byId("search").oninput();
  } else if (event.key === "Escape" && view.service) go({ service: null });
};
document.onvisibilitychange = () => document.hidden ? clearTimeout(live.timer) : live.paused || ask();
window.onpopstate = () => {
  readFragment();
  shownChanged();
};
new ResizeObserver(() => {
  if (live.document) showPicture(live.document, live.document.totals);
  letScrolledBeReached();
}).observe(byId("path"));
readFragment();
shownChanged();
