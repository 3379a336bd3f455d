// Draws the view this server hands out. All text goes in as text, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const SIZES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
const byId = (id) => document.getElementById(id);
const say = (id, text) => { byId(id).textContent = text; };

function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const [factor, unit] of SIZES) {
    if (count >= factor) return `${(count / factor).toFixed(1)} ${unit}`;
  }
  return `${Math.round(count)} B`;
}

const share = (part) => (part === null ? "–" : `${Math.round(100 * part)}%`);
const words = (name) => name.replaceAll("_", " ");
const number = (count) => count.toLocaleString("en");
const counted = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

// A cell knows its column's name: on a narrow screen rows are stacked, and say it themselves.
function cell(column, content, kind) {
  const element = make("td", null, kind);
  element.dataset.column = column;
  element.append(content);
  return element;
}

function line(svg, values, top) {
  const known = values.map((value) => (value === null ? 0 : value));
  const most = top || Math.max(...known, 1e-12);
  const step = 100 / Math.max(1, known.length - 1);
  const points = known.map((v, i) => `${(i * step).toFixed(2)} ${(19 - 18 * v / most).toFixed(2)}`);
  svg.setAttribute("viewBox", "0 0 100 20");
  svg.setAttribute("preserveAspectRatio", "none");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", points.length ? `M${points.join("L")}` : "");
  svg.replaceChildren(path);
  return svg;
}

function part(kind, size, total) {
  const element = make("i", null, kind);
  element.style.width = `${100 * size / Math.max(1, total)}%`;
  return element;
}

function tier(view) {
  const total = view.free + view.cached + view.leased + view.unready;
  const used = view.cached + view.leased;
  const box = make("div", null, "tier");
  const label = make("p");
  const size = view.slot_bytes === null
    ? "" : ` (${bytes(used * view.slot_bytes)} of ${bytes(total * view.slot_bytes)})`;
  const told = view.asked === null
    ? `${number(used)} of ${number(total)} slots${size}, ${number(view.evicted)} evicted`
    : `${number(view.found || 0)} of ${counted(view.asked, "requested block")} found`;
  const away = view.why_away ? `unavailable: ${view.why_away}` : "unavailable";
  label.append(
    make("strong", view.name),
    make("span", view.is_away ? `${away}; ${told}` : told, view.is_away ? "bad" : ""),
  );
  const bar = make("div", null, "bar");
  if (view.asked) bar.append(part("cached", view.found || 0, view.asked));
  for (const state of ["cached", "leased", "free", "unready"]) {
    bar.append(part(state, view[state], total));
  }
  box.append(label, bar);
  if (view.drives) box.append(...drives(view, view.drives));
  return box;
}

function drives(view, told) {
  const lag = told.pending ? ` (oldest ${told.durable_lag.toFixed(1)} s)` : "";
  const began = view.restored ? `, ${counted(view.restored, "block")} found at start` : "";
  const lines = [make("p", `drives: ${bytes(told.read_rate)}/s read, ${bytes(told.write_rate)}/s `
    + `written, ${counted(told.pending, "block")} not durable yet${lag}${began}`, "drives")];
  const problems = Object.entries(told.failed)
    .map(([why, count]) => `${counted(count, "block")} failed (${why})`);
  if (told.num_away) problems.push(`${counted(told.num_away, "drive")} unavailable`);
  if (problems.length) lines.push(make("p", problems.join(", "), "drives bad"));
  return lines;
}

function route(view) {
  const row = make("tr");
  const history = line(document.createElementNS(SVG, "svg"), view.history);
  const speed = view.copy_speed === null ? "–" : `${bytes(view.copy_speed)}/s`;
  const named = Object.entries(view.paths);
  const paths = named.length === 1
    ? named[0][0] : named.map(([name, count]) => `${name} ${bytes(count)}`).join(", ");
  row.append(
    cell("", `${view.src} → ${view.dst}`, "name"),
    cell("now", `${bytes(view.bytes_per_second)}/s`, "number"),
    cell("last minute", history), cell("copy speed", speed, "number"),
    cell("total", bytes(view.total_bytes), "number"), cell("paths", paths || "–", "soft"),
  );
  return row;
}

function tenant(view) {
  const row = make("tr");
  const slots = Object.entries(view.slots).map(([name, count]) => `${name} ${number(count)}`);
  row.append(
    cell("", view.name, "name"), cell("slots", slots.join(", ") || "–"),
    cell("evicted", number(view.evicted), "number"),
    cell("requests", number(view.queries), "number"),
    cell("device misses loaded", share(view.loaded_share), "number"),
  );
  return row;
}

function counts(id, values, nothing, show = number) {
  const total = Object.values(values).reduce((sum, count) => sum + count, 0);
  const rows = Object.entries(values).flatMap(([name, count]) => {
    const bar = make("div", null, "bar");
    bar.append(part("cached", count, total));
    return [make("span", words(name)), bar, make("span", show(count, total), "number")];
  });
  byId(id).replaceChildren(...(rows.length ? rows : [make("p", nothing)]));
}

function request(row) {
  const line = make("tr");
  const shown = (value) => (value === null || value === undefined ? "–" : number(value));
  const found = Object.entries(row.tier_hit_tokens).filter(([, count]) => count)
    .map(([name, count]) => `${name} ${number(count)}`);
  line.append(
    cell("", row.request_id, "name"), cell("tokens", shown(row.asked_tokens), "number"),
    cell("found", found.join(", ") || "–"),
    cell("miss reason", row.reason === "nothing_missed" ? "none" : words(row.reason || "–")),
  );
  return line;
}

function draw(view) {
  say("version", view.idle ? `${view.version}, idle: ${view.idle}` : view.version);
  byId("version").className = view.idle ? "bad" : "";
  say("source", `${view.url}, ${new Date(1000 * view.at).toLocaleTimeString()}`);
  say("hit-rate", view.queries ? share(view.hit_rate) : "–");
  const now = view.hit_rate_now === null ? "" : `, ${share(view.hit_rate_now)} now`;
  say("hit-note", view.queries ? `hit rate${now}` : "loaded, no request yet");
  line(byId("hit-line"), view.hit_history, 1);
  say("queries", number(view.queries));
  say("queries-rate", `${view.queries === 1 ? "request" : "requests"}, ${view.queries_per_second.toFixed(1)}/s, ${counted(view.full_hits, "full hit")}`);
  say("in-flight", number(view.in_flight));
  say("in-flight-note", `${view.in_flight === 1 ? "copy" : "copies"} in flight (${bytes(view.bytes_in_flight)}), ${number(view.queued)} queued, ${counted(view.deferred_stores, "store")} deferred, ${counted(view.leases, "lease")}`);
  byId("pinned").parentElement.hidden = !view.pinned_bytes;
  say("pinned", bytes(view.pinned_bytes));
  const problems = Object.entries(view.problems).filter(([, count]) => count);
  say("problems", number(problems.reduce((sum, [, count]) => sum + count, 0)));
  byId("problems").className = view.problems["failed copies"] ? "bad" : "";
  const named = problems.map(([name, count]) => `${number(count)} ${name}`).join(", ");
  say("problems-note", named || "problems");
  const part = (count, total) => `${share(count / total)}, ${number(count)}`;
  const tokens = Object.entries(view.tokens)
    .map(([name, count]) => [name === "computed" ? name : `found on ${name}`, count]);
  byId("tokens-section").hidden = !view.queries || !tokens.length;
  counts("tokens", Object.fromEntries(tokens), "", part);
  byId("tiers").replaceChildren(...view.tiers.map(tier));
  byId("tenants-section").hidden = !view.tenants.length;
  byId("tenants").tBodies[0].replaceChildren(...view.tenants.map(tenant));
  byId("routes").hidden = !view.routes.length;
  byId("no-routes").hidden = Boolean(view.routes.length);
  byId("routes").tBodies[0].replaceChildren(...view.routes.map(route));
  counts("misses", view.misses, "none");
  counts("decisions", view.decisions, "none");
  const rates = [];
  if (view.load_rate !== null) rates.push(`loads ${bytes(view.load_rate)}/s`);
  if (view.prefill_rate !== null) rates.push(`prefill ${number(Math.round(view.prefill_rate))} tokens/s`);
  say("rates", rates.length ? `Measured: ${rates.join(", ")}` : "");
  byId("recent-section").hidden = !view.recent.length;
  byId("recent").tBodies[0].replaceChildren(...view.recent.map(request));
  document.querySelector("main").hidden = false;
}

async function look() {
  let pause = 1;
  try {
    const reply = await fetch("view.json", { cache: "no-store" });
    const data = await reply.json();
    pause = data.interval || 1;
    byId("error").hidden = !data.error;
    say("error", data.error || "");
    if (data.view) draw(data.view);
  } catch (error) {
    byId("error").hidden = false;
    say("error", "The server of this page does not answer. Start it again: kvferry top --web");
  }
  setTimeout(look, 1000 * pause);
}

look();
