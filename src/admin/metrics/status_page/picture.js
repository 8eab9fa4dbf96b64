// The picture: clients, Services with their VIPs, backends. The width of a link is its rate.

const LINE = 25, GAP = 14, BOX = 46, THICKEST = 40;

/** The least width that the picture is drawn in, pixels: boxes of Services and the addresses of backends need some. */
const NARROWEST = 160;

const cut = (text, characters) => text.length <= characters ? text : text.slice(0, Math.max(1, characters - 1)) + "…";

/** What is drawn of a Service and its backends; rates are packets of both directions. */
function drawn(service, rates, ms) {
  const rate = (of, key) => sum(rates.of(key + " out", of.packets_to_backends, ms), rates.of(key + " back", of.packets_to_clients, ms));
  const members = service.members.map((member) => ({
    ...member, rate: rate(member, `${service.name} ${member.protocol} ${member.address}`), bad: !member.healthy && !member.draining,
  }));
  return {
    name: service.name, rate: rate(service, service.name), members, rest: service.members_total - members.length,
    frontend: service.frontends[0] || "", others: service.frontends_total - 1,
    bad: isTroubled(service), health: healthWord(service), isRefused: service.refused,
  };
}

const isTroubled = (service) => service.reason !== "" || service.backends === 0 || service.healthy < service.backends;

/** The parts of the picture, from back to front, and its height. `clients`: packets a second `out` to backends, `back`, and of `all`. */
function plan(width, services, clients, remaining, open) {
  const { all } = clients;
  const parts = [], narrow = width < 640;
  const put = (tag, key, values) => parts.push({ tag, key, ...values });
  const text = (key, x, y, words, style = "") => put("text", key, { x, y, text: words, class: style });
  const thick = (rate) => all > 0 && rate > 0 ? Math.max(1.5, THICKEST * rate / all) : 1.5;
  const link = (key, x1, y1, x2, y2, rate, bad) => {
    const middle = (x1 + x2) / 2;
    const style = bad ? "link bad" : rate > 0 ? "link" : "link idle";
    put("path", key, { d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, class: style, "stroke-width": bad ? 1.5 : thick(rate).toFixed(1) });
  };
  const fromX = narrow ? 0 : 148, boxX = narrow ? 22 : Math.round(width * 0.29), boxW = narrow ? width - 23 : Math.round(width * 0.345);
  const memberX = narrow ? 56 : Math.round(width * 0.735);
  const characters = Math.floor((boxW - 108) / 7.4);

  let y = narrow ? 62 : 4;
  const boxes = services.map((service) => {
    const lines = service.members.length + (service.rest > 0 ? 1 : 0);
    const top = y;
    const height = narrow ? BOX + lines * LINE : Math.max(BOX, lines * LINE);
    y += height + GAP;
    return { service, top, centre: narrow ? top + BOX / 2 : top + height / 2 };
  });
  if (remaining.count > 0) {
    boxes.push({ rest: true, top: y, centre: y + 15 });
    y += 30 + GAP;
  }
  const height = Math.max(narrow ? 60 : 96, y - GAP + 4);

  // Links lie side by side where they leave the clients, and the Service.
  const widths = boxes.map((box) => thick(box.rest ? remaining.rate : box.service.rate));
  const total = widths.reduce((sum, one) => sum + one + 2, 0);
  const clientsY = narrow ? 24 : height / 2;
  let leave = clientsY - total / 2;
  if (narrow && boxes.length) put("path", "trunk", { d: `M9 46V${boxes[boxes.length - 1].centre + 1}`, class: "trunk" });
  boxes.forEach((box, at) => {
    const rate = box.rest ? remaining.rate : box.service.rate;
    const key = box.rest ? "rest" : box.service.name;
    if (narrow) put("path", `in ${key}`, { d: `M9 ${box.centre}H${boxX}`, class: rate > 0 ? "link" : "link idle", "stroke-width": Math.min(8, thick(rate)).toFixed(1) });
    else link(`in ${key}`, fromX, leave + widths[at] / 2, boxX, box.centre, rate, false);
    leave += widths[at] + 2;
  });

  const [out, back] = [`→ ${packets(clients.out)}`, `← ${packets(clients.back)}`];
  if (narrow) {
    text("clients", 0, 20, "Clients", "strong");
    text("clients out", width - 1, 20, out, "end strong");
    text("clients back", width - 1, 38, back, "end strong");
    text("clients note", 0, 38, "to backends and back", "soft");
  } else {
    const half = Math.max(46, total / 2 + 8);
    put("rect", "clients box", { x: 0.5, y: clientsY - half, width: fromX - 1, height: 2 * half, rx: 6, class: "box" });
    text("clients", 14, clientsY - 19, "Clients", "soft");
    text("clients out", 14, clientsY + 4, out, "large");
    text("clients back", 14, clientsY + 29, back, "large");
  }

  for (const box of boxes) {
    if (box.rest) {
      text("rest", boxX + 12, box.centre + 5, `+ ${count(remaining.count, "Service", "Services")}`, "soft");
      text("rest rate", boxX + boxW - 12, box.centre + 5, packets(remaining.rate), "soft end");
      continue;
    }
    const { service, top, centre } = box, key = service.name;
    const x2 = boxX + boxW, memberTop = narrow ? top + BOX : centre - (service.members.length + (service.rest > 0 ? 1 : 0)) * LINE / 2;
    const memberWidths = service.members.map((member) => member.bad ? 1.5 : thick(member.rate));
    if (narrow && service.members.length) put("path", `trunk ${key}`, { d: `M${boxX + 10} ${top + BOX - 1}V${memberTop + (service.members.length - 0.5) * LINE + 1}`, class: "trunk" });
    let from = centre - memberWidths.reduce((sum, one) => sum + one, 0) / 2;
    service.members.forEach((member, at) => {
      const lineY = memberTop + (at + 0.5) * LINE;
      const style = member.bad ? "link bad" : member.rate > 0 ? "link" : "link idle";
      if (narrow) put("path", `to ${key} ${member.protocol} ${member.address}`, { d: `M${boxX + 10} ${lineY}H${memberX - 12}`, class: style, "stroke-width": Math.min(6, memberWidths[at]).toFixed(1) });
      else link(`to ${key} ${member.protocol} ${member.address}`, x2, from + memberWidths[at] / 2, memberX - 12, lineY, member.rate, member.bad);
      from += memberWidths[at];
    });
    put("rect", `box ${key}`, { x: boxX + 0.5, y: centre - BOX / 2 + 1, width: boxW - 1, height: BOX - 2, rx: 6, class: service.bad ? "box bad" : "box" });
    text(`name ${key}`, boxX + 12, centre - 4, cut(key, characters), "strong");
    text(`rate ${key}`, x2 - 12, centre - 4, packets(service.rate), "end strong");
    const also = service.others > 0 ? `  +${service.others}` : "";
    const room = characters + 14 - also.length - (service.bad ? service.health.length : 0);
    if (!service.isRefused) text(`vip ${key}`, boxX + 12, centre + 14, cut(service.frontend, room) + also, "mono soft");
    if (service.bad) text(`state ${key}`, service.isRefused ? boxX + 12 : x2 - 12, centre + 14, service.health, service.isRefused ? "bad" : "end bad");
    service.members.forEach((member, at) => {
      const lineY = memberTop + (at + 0.5) * LINE, id = `${key} ${member.protocol} ${member.address}`;
      const mark = member.bad ? "M-4 -4L4 4M4 -4L-4 4" : member.draining ? "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0" : "M-4 0L-1 3.5L5 -4";
      put("path", `health ${id}`, { d: mark, transform: `translate(${memberX} ${lineY})`, class: member.bad ? "health bad" : member.draining ? "health draining" : "health" });
      const state = member.bad ? "unhealthy" : member.draining ? "draining" : packets(member.rate);
      text(`address ${id}`, memberX + 14, lineY + 4.5, cut(member.address, Math.floor((width - memberX - 100) / 7.3)), "mono");
      text(`state ${id}`, width - 1, lineY + 4.5, state, member.bad ? "end bad" : "end soft");
    });
    if (service.rest > 0) {
      text(`more ${key}`, memberX + 14, memberTop + (service.members.length + 0.5) * LINE + 4.5, `+ ${count(service.rest, "backend", "backends")}`, "soft");
    }
    if (open) put("rect", `target ${key}`, { x: boxX + 0.5, y: centre - BOX / 2 + 1, width: boxW - 1, height: BOX - 2, rx: 6, class: "target", on: { click: () => open(key) } });
  }
  return { parts, height };
}

/** Draws the picture, and says in a sentence what it shows. */
function drawPicture(svg, width, services, clients, remaining, open) {
  const { parts, height } = plan(width, services, clients, remaining, open);
  const backends = services.reduce((sum, service) => sum + service.members.length + service.rest, 0);
  const bad = services.filter((service) => service.bad).map((service) => service.name);
  const trouble = bad.length ? ` Trouble: ${bad.join(", ")}.` : "";
  set(svg, {
    viewBox: `0 0 ${width} ${height}`, height,
    "aria-label": `Clients send ${packets(clients.out)} and receive ${packets(clients.back)}, by ${count(services.length, "Service", "Services")} with ${count(backends, "backend", "backends")}.${trouble}`,
  });
  const values = ({ tag, key, ...rest }) => rest;
  keep(svg, parts, (part) => part.tag + part.key, (part) => document.createElementNS(SVG, part.tag), (element, part) => set(element, values(part)));
}
