// The tables beside the picture, and the figures above it.

/** One figure: a large number with its unit, a line below it, and the last minutes. */
function figures(document_, rates) {
  const { totals, workers, drops } = document_;
  const ms = totals.at_ms;
  const out = rates.of("out", totals.packets_to_backends, ms), back = rates.of("back", totals.packets_to_clients, ms);
  const bytesOut = rates.of("bytes out", totals.bytes_to_backends, ms), bytesBack = rates.of("bytes back", totals.bytes_to_clients, ms);
  const fresh = rates.of("new flows", totals.new_flows, ms);
  const dropped = Object.values(drops).reduce((sum, one) => sum + one, 0);
  const drop = rates.of("drops", dropped, document_.at_ms);
  const flows = workers.reduce((sum, worker) => sum + worker.flows, 0);
  const room = workers.reduce((sum, worker) => sum + worker.flows_limit, 0);
  const bad = totals.backends_unhealthy, draining = totals.backends_draining;
  const bytes = sum(bytesOut, bytesBack);
  const healthy = totals.backends - bad;
  const notes = [bad ? `${whole(bad)} unhealthy` : totals.backends ? "all healthy" : "none yet", draining ? `${whole(draining)} draining` : ""];
  return [
    { name: "To backends", big: scaled(out, "pps"), under: bits(bytesOut), line: "to_backends" },
    { name: "To clients", big: scaled(back, "pps"), under: bits(bytesBack), line: "to_clients" },
    { name: "Throughput", big: scaled(bytes === null ? null : bytes * 8, "bit/s"), under: "both directions", line: "throughput" },
    { name: "Flows", big: [whole(flows), ""], under: `${perSecond(fresh)} new · ${percent(room ? flows / room : 0)} full`, line: "flows" },
    { name: "Drops", big: scaled(drop, "pps"), under: `${whole(dropped)} since start`, line: "dropped" },
    { name: "Backends healthy", big: [whole(healthy), `of ${whole(totals.backends)}`], under: notes.filter(Boolean).join(" · "), bad: bad > 0, line: "healthy" },
  ];
}

function fillFigures(list, document_, rates) {
  const create = () => make("div", {}, [make("dt"), make("dd", { class: "big" }, [make("span"), " ", make("small")]), make("dd", { class: "under" }), make("dd", { "aria-hidden": "true" }, [spark()])]);
  keep(list, figures(document_, rates), (figure) => figure.name, create, (element, figure) => {
    const [name, big, under, line] = element.children;
    set(name, { text: figure.name });
    set(big.children[0], { text: figure.big[0] });
    set(big.children[1], { text: figure.big[1] });
    set(under, { text: figure.under, class: figure.bad ? "under bad" : "under" });
    drawSpark(line.firstChild, document_.lines[figure.line]);
  });
}

/** A word for the health of a Service; colour says nothing that it does not. */
function healthWord(service) {
  if (service.refused) return service.reason;
  if (service.backends === 0) return "no backends";
  return service.healthy < service.backends ? `${whole(service.healthy)} of ${whole(service.backends)} healthy` : `${whole(service.backends)} healthy`;
}

function serviceColumns(rates, at, open) {
  const rate = (key) => (service) => rates.of(`${service.name} ${key}`, service[key], at());
  const bytes = (service) => sum(rate("bytes_to_backends")(service), rate("bytes_to_clients")(service));
  const both = (service) => sum(rate("packets_to_backends")(service), rate("packets_to_clients")(service));
  return [
    {
      title: "Service", class: "name",
      create: (service) => make("button", { type: "button", on: { click: () => open(service.name) } }),
      update: (button, service) => set(button, { text: service.name, title: service.name }),
    },
    { title: "Frontend", class: "mono wide", text: (service) => service.frontends.length ? service.frontends[0] + (service.frontends_total > 1 ? `  +${service.frontends_total - 1}` : "") : "–" },
    { title: "Mode", class: "dim wide", text: (service) => service.mode },
    { title: "Backends", text: healthWord, bad: isTroubled },
    { title: "Packets", class: "num", text: (service) => packets(both(service)) },
    { title: "Throughput", class: "num wide", text: (service) => bits(bytes(service)) },
    { title: "Flows", class: "num wide", text: (service) => whole(service.flows) },
    { title: "New", class: "num wide", text: (service) => perSecond(rate("new_flows")(service)) },
    {
      title: "Last 3 min", class: "num wide", create: () => spark(),
      update: (line, service) => drawSpark(line, service.line),
    },
  ];
}

function memberColumns(rates, at, name) {
  const rate = (member, key) => rates.of(`${name()} ${member.protocol} ${member.address} ${key}`, member[key], at());
  const word = (member) => member.draining ? "draining" : member.healthy ? "healthy" : "unhealthy";
  return [
    { title: "Backend", class: "mono", text: (member) => member.address },
    { title: "Protocol", text: (member) => member.protocol },
    {
      title: "State", class: "state", create: () => make("div", {}, [make("span"), make("p", { class: "why" })]),
      update: (cell, member) => {
        const [state, why] = cell.children;
        set(state, { text: word(member), class: !member.healthy && !member.draining ? "bad" : null });
        set(why, { text: member.reason, hidden: member.reason ? null : "" });
      },
    },
    { title: "Since", class: "num wide", text: (member) => member.since ? ago(member.since) : "" },
    { title: "To backend", class: "num", text: (member) => packets(rate(member, "packets_to_backends")) },
    { title: "To clients", class: "num wide", text: (member) => packets(rate(member, "packets_to_clients")) },
    { title: "Throughput", class: "num wide", text: (member) => bits(sum(rate(member, "bytes_to_backends"), rate(member, "bytes_to_clients"))) },
    { title: "Flows", class: "num", text: (member) => whole(member.flows) },
    { title: "New", class: "num wide", text: (member) => perSecond(rate(member, "new_flows")) },
    { title: "Failed", class: "num wide", text: (member) => whole(member.failed_connections) },
    { title: "Reset", class: "num wide", text: (member) => whole(member.reset_connections) },
    { title: "Weight", class: "num wide", text: (member) => whole(member.weight) },
  ];
}

function bar() {
  return make("span", { class: "bar", "aria-hidden": "true" }, [make("i")]);
}

function drawBar(element, share, full) {
  set(element, { class: full ? "bar full" : "bar" });
  element.firstChild.style.width = `${Math.min(100, 100 * (share || 0)).toFixed(1)}%`;
}

/** Share of a worker's time that packets took since the last reading. */
function busy(worker, rates, ms) {
  const all = rates.of(`worker ${worker.worker} cycles`, worker.cycles, ms);
  const spent = rates.of(`worker ${worker.worker} busy`, worker.busy_cycles, ms);
  return all === null || spent === null ? null : all > 0 ? spent / all : 0;
}

function workerColumns(rates, at) {
  const share = (worker) => busy(worker, rates, at());
  return [
    { title: "No.", text: (worker) => String(worker.worker) },
    { title: "Load", class: "grow", create: bar, update: (element, worker) => drawBar(element, share(worker), share(worker) > 0.9) },
    { title: "Busy", class: "num", text: (worker) => percent(share(worker)), bad: (worker) => share(worker) > 0.9 },
    { title: "Packets in", class: "num", text: (worker) => packets(rates.of(`worker ${worker.worker}`, worker.received_packets, at())) },
    { title: "Flows", class: "num", text: (worker) => whole(worker.flows) },
  ];
}

function dropColumns(rates, at) {
  const rate = (drop) => rates.of(`drop ${drop.reason}`, drop.packets, at());
  return [
    { title: "Reason", class: "mono", text: (drop) => drop.reason },
    { title: "Rate", class: "num grow", text: (drop) => packets(rate(drop)) },
    { title: "Since start", class: "num", text: (drop) => whole(drop.packets) },
  ];
}

function portColumns(rates, at) {
  const rate = (port, key) => bits(rates.of(`port ${port.name} ${key}`, port[key], at()));
  return [
    { title: "Port", text: (port) => port.name },
    { title: "Link", text: (port) => port.link + (port.link === "up" && port.speed_mbps ? ` ${port.speed_mbps / 1000}G` : ""), bad: (port) => port.link !== "up" },
    { title: "In", class: "num", text: (port) => rate(port, "receive_bytes") },
    { title: "Out", class: "num", text: (port) => rate(port, "transmit_bytes") },
    { title: "Missed", class: "num", text: (port) => whole(port.missed_packets) },
  ];
}

const troubleColumns = [
  { title: "Object", text: (trouble) => trouble.object, bad: (trouble) => trouble.severity !== "notice" },
  { title: "Since", class: "num", text: (trouble) => ago(trouble.since) },
  { title: "Cause, and what to do", class: "grow", text: (trouble) => `${trouble.severity}: ${trouble.cause} → ${trouble.remedy}` },
];

const heavyFlowColumns = [
  { title: "Flow", class: "mono whole", text: (flow) => `${flow.protocol} ${flow.client} → ${flow.frontend} → ${flow.backend}` },
  { title: "Throughput", class: "num", text: (flow) => bits(flow.bits_per_second / 8) },
];

const heavyClientColumns = [
  { title: "Client", class: "mono whole", text: (client) => client.client },
  { title: "Service", class: "whole", text: (client) => client.service || "several" },
  { title: "Throughput", class: "num", text: (client) => bits(client.bits_per_second / 8) },
];

const taskColumns = [
  { title: "Task", text: (task) => task.name },
  { title: "Restarts", class: "num", text: (task) => whole(task.restarts) },
  { title: "Last failure", class: "grow", text: (task) => task.last_failure },
];

/** Time of an event: how long ago, or its date. */
function ago(time) {
  const seconds = (Date.now() - Date.parse(time)) / 1000;
  return Number.isNaN(seconds) ? time : seconds < 86400 ? `${duration(Math.max(0, seconds))} ago` : time.slice(0, 16).replace("T", " ");
}

function fillEvents(list, events) {
  const create = (event) => make("li", {}, [make("time", { datetime: event.time, title: event.time }), make("b"), make("span"), make("p")]);
  keep(list, events, (event) => [event.time, event.object, event.reason, event.message].join("\n"), create, (item, event) => {
    const [time, object, reason, message] = item.children;
    const trouble = event.type === "Warning";
    set(time, { text: ago(event.time) });
    set(object, { text: event.object.replace(/^Service /, "") });
    set(reason, { text: trouble ? ` ▲ ${event.reason}` : ` ${event.reason}`, class: trouble ? "bad" : "dim", "aria-label": trouble ? `Warning: ${event.reason}` : null });
    set(message, { text: event.message });
  });
}
