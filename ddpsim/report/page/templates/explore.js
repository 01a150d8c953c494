"use strict";
// The live page. It shows what one function answers (a question in, JSON out), and keeps the state:
// settings by key on top of a text; both stand in the address, so that a link shows them again.
(() => {
  const { css, draw, inWords, isNarrow, ms, nameOf, timelineOf } = drawing;
  const byId = (id) => document.getElementById(id);
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const WAIT_MS = 250; // for more letters, and for a server that has ended
  const TOKEN = "ddpsim-token";
  const sleep = (time_ms) => new Promise((done) => { setTimeout(done, time_ms); });

  const tell = (words, isBad = false) => {
    byId("note").textContent = words;
    byId("note").classList.toggle("bad", isBad);
  };

  // ---- the one function: of a server, or of a worker in which the simulator runs
  const { worker } = JSON.parse(byId("data").textContent);
  const asker = (name) => {
    const python = new Worker(name, { type: "module" });
    const waiting = []; // answers come in the order of their questions
    python.onmessage = ({ data }) => { if (data.note === undefined) waiting.shift()(data.answer); else tell(data.note, data.isBad); };
    python.onerror = () => tell(`${name} cannot be loaded: this page is not built whole.`, true);
    return (question) => new Promise((done) => { waiting.push(done); python.postMessage(question); });
  };
  const askServer = async (question) => {
    const token = localStorage.getItem(TOKEN) || "";
    const headers = { "Content-Type": "application/json", "X-Ddpsim-Token": token };
    for (;;) {
      let reply;
      try {
        reply = await fetch("answer", { method: "POST", headers, body: JSON.stringify(question) });
      } catch {
        tell(`The server has ended. Start it again (ddpsim explore ${start?.name ?? ""}): this page keeps its state.`, true);
        await sleep(4 * WAIT_MS);
        continue;
      }
      if (reply.ok) {
        if (byId("note").classList.contains("bad")) tell("");
        return reply.json();
      }
      const newer = localStorage.getItem(TOKEN) || "";
      if (reply.status !== 401) throw new Error(await reply.text());
      if (newer === headers["X-Ddpsim-Token"]) {
        tell("Open the address that ddpsim explore printed: it has a new token.", true);
        await sleep(4 * WAIT_MS);
      }
      headers["X-Ddpsim-Token"] = localStorage.getItem(TOKEN) || "";
    }
  };
  const ask = worker ? asker(worker) : askServer;
  // one call at a time; whatever comes meanwhile is asked once, when that has ended
  const latest = (run) => {
    let isBusy = false;
    let again = false;
    return async () => {
      again = true;
      if (isBusy) return;
      isBusy = true;
      while (again) { again = false; await run(); }
      isBusy = false;
    };
  };

  // ---- the state, and the address
  let start = null;
  let state = { settings: new Map(), text: null };
  let pinned = null; // { state, answer }
  let now = null; // the last answer without problems
  let lesson = null;
  const copyOf = ({ settings, text }) => ({ settings: new Map(settings), text });
  const settingsOf = ({ settings }) => [...settings].map(([key, value]) => `${key}=${value}`);
  const asked = (part, of = state) => ({ part, text: of.text ?? start.text, settings: settingsOf(of) });
  const encode = (of, pin) => {
    const words = new URLSearchParams([...of.settings]);
    if (of.text !== null) words.set("yaml", of.text);
    if (pin) words.set("pin", encode(pin.state));
    return words.toString();
  };
  const decode = (words) => {
    const found = new URLSearchParams(words);
    const text = found.get("yaml");
    const pin = found.get("pin");
    for (const key of ["yaml", "pin", "token"]) found.delete(key);
    return { state: { settings: new Map(found), text }, pin: pin === null ? null : decode(pin).state };
  };
  const remember = () => history.replaceState(null, "", `#${encode(state, pinned)}`);

  const change = (settings) => {
    for (const setting of settings) {
      const at = setting.indexOf("=");
      const key = setting.slice(0, at);
      for (const other of [...state.settings.keys()]) if (other === key || other.startsWith(`${key}.`)) state.settings.delete(other);
      state.settings.set(key, setting.slice(at + 1));
    }
    moved();
  };
  const moved = () => {
    byId("app").setAttribute("aria-busy", "true");
    for (const part of document.querySelectorAll(".late")) part.classList.add("stale");
    simulate();
  };
  const simulate = latest(async () => {
    const of = copyOf(state);
    const answer = await ask(asked("step", of));
    if (encode(of) !== encode(state)) return;
    showProblems(answer);
    if (!answer.problems) { now = answer; showStep(); soon(); }
    remember();
    byId("app").setAttribute("aria-busy", "false");
    document.documentElement.dataset.drawn = "yes";
  });
  let timer = 0;
  const soon = () => { clearTimeout(timer); timer = setTimeout(complete, WAIT_MS); };
  const complete = latest(async () => {
    const of = copyOf(state);
    for (const [part, show] of [["sure", showSure], ["scaling", showScaling]]) {
      const answer = await ask(asked(part, of));
      if (encode(of) !== encode(state)) return;
      if (answer.problems) showProblems(answer);
      else show(answer);
    }
  });

  // ---- controls
  const shown = new Map(); // the control of each key: { set(place) }
  const newControl = (control) => {
    const id = `control-${control.key}`;
    const output = make("output", { htmlFor: id });
    const input = control.kind === "list" ? make("select", { id }) : make("input", { id, type: "range", min: 0, step: 1 });
    const box = make("div", { className: "control" }, make("label", { htmlFor: id, textContent: control.name, title: control.key }), output, input);
    const mend = (place) => {
      box.classList.toggle("off", !place);
      input.disabled = !place;
      box.classList.toggle("moved", [...state.settings.keys()].some((key) => key === control.key || key.startsWith(`${control.key}.`)));
      if (place) set(...place);
    };
    const set = control.kind === "list" ? listed(control, input) : slid(control, input, output);
    shown.set(control.key, { mend });
    return box;
  };
  const listed = (control, input) => {
    const groups = new Map();
    control.options.forEach(({ words, group }, i) => {
      const option = make("option", { value: i, textContent: words });
      if (!group) { input.append(option); return; }
      if (!groups.has(group)) groups.set(group, input.appendChild(make("optgroup", { label: group })));
      groups.get(group).append(option);
    });
    const own = input.appendChild(make("option", { value: -1, hidden: true }));
    input.addEventListener("change", () => {
      const { settings, keep = [] } = control.options[Number(input.value)];
      const kept = keep.filter((key) => now.controls[key]).map((key) => `${key}=${now.controls[key][1]}`);
      change([...(control.key === "ddp.strategy" ? now.leaving : []), ...settings, ...kept]);
    });
    return (words) => {
      const at = control.options.findIndex((option) => option.words === words);
      own.textContent = words;
      input.value = `${at}`;
    };
  };
  const slid = (control, input, output) => {
    let stops = control.stops;
    input.addEventListener("input", () => {
      const stop = stops[Number(input.value)];
      output.textContent = stop.words;
      input.setAttribute("aria-valuetext", stop.words);
      change([`${control.key}=${stop.value}`]);
    });
    return (words, number) => {
      if (Number(input.value) < stops.length && stops[Number(input.value)].words === words && input.max) return;
      stops = control.stops;
      const value = state.settings.get(control.key) ?? now.inputs[control.key] ?? words;
      const at = number === null ? 0 : stops.findIndex((stop) => stop.number >= number * (1 - 1e-9));
      const isThere = at >= 0 && number !== null && Math.abs(stops[at].number - number) <= 1e-9 * number;
      const place = at < 0 ? stops.length : at;
      if (!isThere) stops = [...stops.slice(0, place), { words, value, number }, ...stops.slice(place)];
      input.max = stops.length - 1;
      input.value = place;
      output.textContent = words;
      input.setAttribute("aria-valuetext", words);
    };
  };
  const showControls = () => {
    for (const [key, { mend }] of shown) mend(now.controls[key]);
    if (document.activeElement !== byId("yaml")) byId("yaml").value = now.text;
  };

  // ---- what is wrong
  const goTo = ({ line }) => {
    choose("text");
    const area = byId("yaml");
    const lines = area.value.split("\n");
    const from = lines.slice(0, line - 1).join("\n").length + (line > 1);
    area.focus();
    area.setSelectionRange(from, from + (lines[line - 1] ?? "").length);
  };
  const showProblems = ({ problems = [], text }) => {
    byId("answer").classList.toggle("stale", problems.length > 0);
    if (problems.length && text && document.activeElement !== byId("yaml")) byId("yaml").value = text;
    byId("problems").replaceChildren(...problems.map((problem) => {
      const { line, key, message } = problem;
      const place = line ? [make("button", { type: "button", textContent: `line ${line}`, onclick: () => goTo(problem) }), " "] : [];
      return make("li", {}, ...place, make("strong", { textContent: key }), `${key && ": "}${message}`);
    }));
  };

  // ---- the step
  const signed = (share) => `${share > 0 ? "+" : "\u2212"}${Math.abs(100 * share).toFixed(Math.abs(share) < 0.1 ? 1 : 0)} %`;
  const against = ({ key, value }) => {
    const before = pinned?.answer.facts.find((fact) => fact.key === key);
    if (!before) return "";
    const share = before.value ? value / before.value - 1 : 0;
    return `pinned ${before.text}${Math.abs(share) >= 5e-4 ? `, ${signed(share)}` : ""}`;
  };
  const showFacts = () => {
    const interval = make("small", { id: "interval", className: "late stale" });
    interval.textContent = byId("interval")?.textContent ?? "";
    byId("facts").replaceChildren(...now.facts.map((fact) => make("div", {},
      make("dt", { textContent: fact.name }),
      make("dd", {}, make("span", { textContent: fact.text, className: fact.key === "step" ? "main" : "" }),
        ...(fact.key === "step" ? [interval] : []), make("small", { textContent: against(fact) })))));
    byId("bottleneck").replaceChildren(make("strong", { textContent: `Bottleneck: ${now.bottleneck.kind}. ` }), `${now.bottleneck.text[0].toUpperCase()}${now.bottleneck.text.slice(1)}.`);
    byId("warnings").replaceChildren(...now.warnings.map((words) => make("p", { className: "warning", textContent: words })));
  };
  const showDiffers = () => {
    byId("compare").hidden = !pinned;
    byId("pin").setAttribute("aria-pressed", `${Boolean(pinned)}`);
    byId("pin").textContent = pinned ? "Unpin" : "Pin";
    if (!pinned) return;
    const [before, after] = [pinned.answer.inputs, now.inputs];
    const keys = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter((key) => before[key] !== after[key]);
    const words = keys.map((key) => make("li", {}, make("code", { textContent: key }), ` ${before[key] ?? "default"} \u2192 ${after[key] ?? "default"}`));
    byId("differs").replaceChildren(words.length ? make("ul", { className: "plain" }, ...words) : "Nothing differs yet: move a control.");
  };
  const fill = (id, head, rows) => {
    const cell = (tag, words, isText, properties = {}) => make(tag, { textContent: words, className: isText ? "words" : "", ...properties });
    const texts = head.map((title) => title === "names" || title === "basis" || title === "source" || title === "with failures");
    byId(id).replaceChildren(
      make("thead", {}, make("tr", {}, ...head.map((title, i) => (title ? cell("th", title, texts[i], { scope: "col" }) : make("td"))))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((words, i) => (i ? (words instanceof Node ? words : cell("td", words, texts[i])) : cell("th", words, false, { scope: "row" })))))));
  };
  const bar = ({ share, colour, over, hatched }) => {
    const span = make("span", { className: hatched ? "hatched" : "" });
    span.style.width = `${100 * share}%`;
    span.style.setProperty("--colour", `var(${colour})`);
    span.style.setProperty("--over", `var(${over})`);
    const cell = make("td", { className: "bar" }, ...(share > 0 ? [span] : []));
    cell.setAttribute("aria-hidden", "true");
    return cell;
  };
  const showTables = () => {
    fill("breakdown", ["part", "time", "share", ""], now.breakdown.map((part) => [part.name, part.text, `${(100 * part.share).toFixed(1)}%`, bar(part)]));
    byId("buckets-title").textContent = now.sent_in === "bucket" ? "Buckets" : `${now.sent_in[0].toUpperCase()}${now.sent_in.slice(1)}`;
    fill("buckets", ["", "size", "parameters", "ready", "start", "end", "exposed", "names"],
      now.buckets.map((b) => [b.index, b.size, b.parameters, b.ready, b.start, b.end, b.exposed, b.names]));
  };
  const SHADES = ["--backward", "--forward", "--hidden", "--optimizer", "--copies", "--idle"];
  const showMemory = () => {
    const { parts, total, device, fits, unknown } = now.memory;
    const gauge = make("div", { className: "gauge" }, ...parts.map(({ share }, i) => {
      const span = make("span");
      span.style.width = `${100 * share}%`;
      span.style.background = `var(${SHADES[i % SHADES.length]})`;
      return span;
    }));
    gauge.setAttribute("aria-hidden", "true");
    const legend = make("ul", { className: "legend" }, ...parts.map(({ name, text }, i) => {
      const swatch = make("span", { className: "swatch" });
      swatch.style.setProperty("--colour", `var(${SHADES[i % SHADES.length]})`);
      return make("li", {}, swatch, `${name} ${text}`);
    }));
    const missing = unknown.length ? `; ${unknown.join(", ")} unknown` : "";
    byId("memory").replaceChildren(make("p", { className: fits ? "" : "bad", textContent: `${total} of ${device}${fits ? "" : ": does not fit"}${missing}` }), gauge, legend);
  };

  // ---- timeline and events
  let view = null; // null: the whole step
  let at = -1; // the event gone to
  let gone = []; // events
  const slowest = () => now.timeline.ranks.find((rank) => rank.is_slowest);
  const ranksShown = () => {
    const of = (answer) => (byId("shown").value === "slowest" ? answer.timeline.ranks.filter((rank) => rank.is_slowest) : answer.timeline.ranks);
    const before = pinned ? of(pinned.answer).map((rank) => ({ ...rank, label: `pinned,<br>${rank.label}`, is_slowest: false })) : [];
    return [...before, ...of(now)];
  };
  const spanShown = () => {
    const spans = [now, ...(pinned ? [pinned.answer] : [])].map((answer) => answer.timeline.span_ns);
    return [Math.min(...spans.map(([from]) => from)), Math.max(...spans.map(([, to]) => to))];
  };
  const cursor = () => (at < 0 ? [] : [{ type: "line", xref: "x", yref: "paper", x0: ms(gone[at].at_ns), x1: ms(gone[at].at_ns), y0: 0, y1: 1, line: { color: "--focus", width: 2 } }]);
  const drawTimeline = () => {
    const ranks = ranksShown();
    const hasRing = byId("rings").checked;
    const { traces, layout } = timelineOf({ ranks, looks: start.looks, view: view ?? spanShown(), hasRing });
    draw(byId("drawing-timeline"), traces, { ...layout, shapes: cursor() });
  };
  const ringEvents = () => slowest().collectives.flatMap((comm) => Array.from({ length: comm.ring_steps }, (_, i) => ({
    at_ns: comm.ring_start_ns + ((comm.end_ns - comm.ring_start_ns) * i) / comm.ring_steps,
    words: `Ring step ${i + 1} of ${comm.ring_steps} of ${nameOf(comm)}: each rank ${i < comm.ring_steps / 2 ? "adds the chunk that it receives to its own" : "passes on a chunk that is summed"}.`,
    ring: [i, comm.ring_steps],
  })));
  const newEvents = () => {
    gone = byId("rings").checked ? [...now.events, ...ringEvents()].sort((a, b) => a.at_ns - b.at_ns) : now.events;
    at = -1;
    byId("event").textContent = `${gone.length} events: arrow keys go from one to the next.`;
    byId("ring").setAttribute("hidden", "");
  };
  const go = (by) => {
    at = Math.min(Math.max(at + by, 0), gone.length - 1);
    const { at_ns, words, ring } = gone[at];
    byId("event").replaceChildren(make("b", { textContent: inWords(at_ns) }), words);
    const [from, to] = view ?? spanShown();
    if (at_ns < from || at_ns > to) { view = [at_ns - (to - from) / 2, at_ns + (to - from) / 2]; drawTimeline(); } else {
      const shapes = cursor().map((line) => ({ ...line, line: { ...line.line, color: css(line.line.color) } }));
      Plotly.relayout(byId("drawing-timeline"), { shapes });
    }
    drawRing(ring);
  };
  let playing = 0;
  const play = () => {
    clearInterval(playing);
    playing = playing ? 0 : setInterval(() => { if (at < gone.length - 1) go(1); else play(); }, 900);
    byId("play").textContent = playing ? "Stop" : "Play";
    byId("play").setAttribute("aria-pressed", `${Boolean(playing)}`);
  };
  // ranks on a circle; in step s rank r sends chunk r - s to its neighbour
  const drawRing = (ring) => {
    const svg = byId("ring");
    svg.toggleAttribute("hidden", !ring);
    if (!ring) return;
    const [step, steps] = ring;
    const count = steps / 2 + 1;
    const svgOf = (tag, attributes, words = "") => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      element.textContent = words;
      return element;
    };
    const place = (turn, radius = 48) => [60 + radius * Math.sin(turn * 2 * Math.PI), 60 - radius * Math.cos(turn * 2 * Math.PI)];
    const few = count <= 16;
    svg.replaceChildren(svgOf("circle", { cx: 60, cy: 60, r: 48, class: "ways" }), ...Array.from({ length: count }, (_, rank) => {
      const [x, y] = place(rank / count);
      const [cx, cy] = place((rank + 0.5) / count);
      const chunk = (((rank - step) % count) + count) % count;
      return [svgOf("circle", { cx: x, cy: y, r: few ? 5 : 2 }), svgOf("circle", { cx, cy, r: few ? 3.5 : 1.5, class: "chunk" }), ...(count <= 8 ? [svgOf("text", { x: place((rank + 0.5) / count, 34)[0], y: place((rank + 0.5) / count, 34)[1] + 3 }, `${chunk}`)] : [])];
    }).flat());
    svg.setAttribute("aria-label", `Ring of ${count} ranks, step ${step + 1} of ${steps}`);
  };
  const showLegend = () => {
    const looks = new Map(Object.values(start.looks).map((look) => [look.name, look]));
    const ranks = ranksShown();
    const used = new Set(ranks.flatMap((rank) => [...rank.compute, ...rank.host]).map(([kind]) => start.looks[kind].name));
    for (const kind of ["hidden", "exposed"]) if (ranks.some((rank) => rank[`${kind}_ns`])) used.add(start.looks[kind].name);
    byId("legend").replaceChildren(...[...looks.values()].filter(({ name }) => used.has(name)).map((look) => {
      const swatch = make("span", { className: `swatch${look.hatched ? " hatched" : ""}` });
      swatch.style.setProperty("--colour", `var(${look.colour})`);
      swatch.style.setProperty("--over", `var(${look.over})`);
      return make("li", {}, swatch, look.name);
    }));
  };
  const showStep = () => {
    byId("title").textContent = now.name;
    byId("ranks").textContent = now.ranks;
    showControls();
    showFacts();
    showDiffers();
    newEvents();
    drawTimeline();
    showLegend();
    showTables();
    showMemory();
  };

  // ---- what follows
  const fresh = (id) => (byId(id).closest(".late") ?? byId(id)).classList.remove("stale");
  const showSure = (answer) => {
    byId("interval").textContent = `${answer.interval.name} ${answer.interval.text}`;
    fill("sources", ["input", "effect", "basis"], answer.sources.map((source) => [source.input, source.text, source.basis]));
    fill("cost", ["of", "time", "GPU-hours", "price"], answer.cost.map((row) => [row.what, row.time, row.gpu_hours, row.money ?? "\u2013"]));
    byId("with-failures").hidden = !answer.month.length;
    fill("month", ["30 days of steps", "with failures"], answer.month);
    byId("price").textContent = answer.cost[0].source ?? "No list price of this machine is known.";
    byId("next").replaceChildren(...answer.next.map(({ why, settings }) => {
      const canTry = settings.length && !settings.some((setting) => setting.includes("MEASURED"));
      const words = canTry ? [make("button", { type: "button", textContent: "Try", title: settings.join(" "), onclick: () => change(settings) }), " "] : [];
      return make("li", {}, ...words, why);
    }));
    for (const id of ["interval", "sources", "cost", "month", "next"]) fresh(id);
  };
  let scaling = null;
  const drawScaling = () => { if (scaling) draw(byId("drawing-scaling"), scaling.data, { ...scaling.layout, height: 300, legend: { ...scaling.layout.legend, y: -0.3 } }); };
  const showScaling = ({ figure, left_out: reasons }) => {
    scaling = figure;
    drawScaling();
    byId("left-out").textContent = reasons.length ? `Not shown: ${reasons.join("; ")}` : "";
    fresh("drawing-scaling");
  };

  // ---- what buttons do
  const pin = () => {
    pinned = pinned ? null : { state: copyOf(state), answer: now };
    showStep();
    remember();
  };
  const quoted = (words) => (/^[\w.,/=:+-]+$/.test(words) ? words : `'${words.replaceAll("'", "'\\''")}'`);
  const copy = async () => {
    const own = state.text === null;
    const sets = own ? settingsOf(state).map((setting) => ` --set ${quoted(setting)}`).join("") : "";
    const command = `ddpsim run ${own ? quoted(start.name) : "-"}${sets}${own ? "" : ` <<'YAML'\n${now.text}YAML`}`;
    try {
      await navigator.clipboard.writeText(command);
      tell(own ? `Copied: ${command}` : "Copied: the command, with this YAML behind it");
    } catch {
      tell(command);
    }
  };
  const save = async () => {
    tell("The report is being written ...");
    const answer = await ask(asked("report"));
    if (answer.problems) { showProblems(answer); tell(""); return; }
    const url = URL.createObjectURL(new Blob([answer.html], { type: "text/html" }));
    make("a", { href: url, download: "step.html" }).click();
    URL.revokeObjectURL(url);
    tell("Saved: step.html");
  };
  const reset = () => { state = { settings: new Map(), text: null }; pinned = null; view = null; moved(); };
  const choose = (name) => {
    for (const each of ["sliders", "text"]) {
      byId(each).hidden = each !== name;
      byId(`tab-${each}`).setAttribute("aria-selected", `${each === name}`);
      byId(`tab-${each}`).tabIndex = each === name ? 0 : -1;
    }
  };

  // ---- lessons
  const begin = (number) => {
    lesson = start.lessons[number];
    const text = start.lesson_text === start.text ? null : start.lesson_text;
    state = { settings: new Map(), text };
    pinned = null;
    view = null;
    change(lesson.start);
    const answers = lesson.choices.map(([words], i) => make("label", {}, make("input", { type: "radio", name: "choice", value: i }), ` ${words}`));
    const check = make("button", { type: "button", className: "primary", textContent: "Show", onclick: () => solve(number) });
    const close = make("button", { type: "button", textContent: "Close", onclick: () => { byId("lesson").hidden = true; } });
    const question = make("fieldset", {}, make("p", { textContent: lesson.question }), ...answers);
    byId("lesson").replaceChildren(make("h2", { textContent: `Lesson ${number + 1} of ${start.lessons.length}: ${lesson.title}` }),
      make("p", { textContent: lesson.text }), question, make("div", { className: "row" }, check, close), make("p", { id: "verdict", ariaLive: "polite" }));
    byId("lesson").hidden = false;
  };
  const solve = async (number) => {
    const { start: from, change: to, figure, choices, after } = lesson;
    const text = start.lesson_text;
    const [before, later] = [await ask({ part: "step", text, settings: from }), await ask({ part: "step", text, settings: [...from, ...to] })];
    const of = (answer) => answer.facts.find(({ key }) => key === figure);
    const ratio = of(later).value / of(before).value;
    const right = choices.findLastIndex(([, least]) => ratio >= least);
    const said = byId("lesson").querySelector("input:checked")?.value;
    const verdict = said === undefined ? "" : Number(said) === right ? "Right. " : "Not quite. ";
    const next = number + 1 < start.lessons.length ? [" ", make("button", { type: "button", textContent: "Next lesson", onclick: () => begin(number + 1) })] : [];
    byId("verdict").replaceChildren(make("strong", { textContent: verdict }),
      `${choices[right][0]}: ${of(before).name.toLowerCase()} ${of(before).text} \u2192 ${of(later).text}. ${after}`, ...next);
    pinned = { state: { settings: new Map(from.map(split)), text: state.text }, answer: before };
    change(to);
  };
  const split = (setting) => [setting.slice(0, setting.indexOf("=")), setting.slice(setting.indexOf("=") + 1)];

  // ---- the start
  const restore = async (words) => {
    const found = decode(words);
    state = found.state;
    const answer = found.pin && (await ask(asked("step", found.pin)));
    pinned = answer && !answer.problems ? { state: found.pin, answer } : null;
    moved();
  };
  const listen = () => {
    const actions = { pin, reset, copy, save, play, back: () => go(-1), forth: () => go(1) };
    for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
    for (const name of ["sliders", "text"]) {
      const other = name === "text" ? "sliders" : "text";
      byId(`tab-${name}`).addEventListener("click", () => choose(name));
      byId(`tab-${name}`).addEventListener("keydown", ({ key }) => { if (/Arrow(Left|Right)/.test(key)) { choose(other); byId(`tab-${other}`).focus(); } });
    }
    let typing = 0;
    byId("yaml").addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => { state = { settings: new Map(), text: byId("yaml").value }; moved(); }, WAIT_MS);
    });
    byId("rings").addEventListener("change", () => { newEvents(); drawTimeline(); });
    byId("shown").addEventListener("change", drawTimeline);
    document.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !now || !(event.target === document.body || event.target.closest("#drawing-timeline, .head"))) return;
      if (event.target.matches("select, input")) return;
      event.preventDefault();
      go(by);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (now) { drawTimeline(); drawScaling(); } });
    addEventListener("hashchange", () => { if (keepToken() !== encode(state, pinned)) restore(location.hash.slice(1)); });
    byId("drawing-timeline").on("plotly_relayout", (said) => {
      const range = said["xaxis.range"] ?? (said["xaxis.range[0]"] === undefined ? null : [said["xaxis.range[0]"], said["xaxis.range[1]"]]);
      if (range) { view = range.map((time_ms) => Number(time_ms) * 1e6); drawTimeline(); }
      else if (said["xaxis.autorange"]) { view = null; drawTimeline(); }
    });
  };
  // a token in the address is kept, and taken out of it: a link need not hold it
  const keepToken = () => {
    const words = new URLSearchParams(location.hash.slice(1));
    if (words.has("token")) localStorage.setItem(TOKEN, words.get("token"));
    words.delete("token");
    return words.toString();
  };
  const open = async () => {
    const words = keepToken();
    start = await ask({ part: "start" });
    const groups = new Map();
    for (const control of start.controls) {
      if (!groups.has(control.group)) groups.set(control.group, byId("sliders").appendChild(make("fieldset", {}, make("legend", { textContent: control.group }))));
      groups.get(control.group).append(newControl(control));
    }
    byId("lessons").append("Lessons: ", ...start.lessons.map(({ title }, i) => make("button", { type: "button", textContent: title, onclick: () => begin(i) })));
    if (isNarrow()) byId("shown").value = "slowest";
    Plotly.newPlot(byId("drawing-timeline"), [], {}, {});
    listen();
    const number = start.lessons.findIndex(({ name }) => name === start.lesson);
    if (number >= 0 && !words) begin(number);
    else await restore(words);
  };
  open();
})();
