"use strict";
// What every page draws: colours by the style sheet's names, plotly's frame, timelines of ranks.
const drawing = (() => {
  const isNarrow = () => window.innerWidth < 600;
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" };

  // colours are named as the style sheet names them, so that light and dark need no second list
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const coloured = (value) => {
    if (typeof value === "string") return value.startsWith("--") ? css(value) : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, coloured(part)]));
  };

  // what every drawing has, and what a layout says besides
  const framed = (layout) => {
    const size = isNarrow() ? 11 : 13;
    const axis = (own = {}) => ({
      gridcolor: "--line", zerolinecolor: "--line", linecolor: "--faint", automargin: true, ...own,
      title: { ...own.title, font: { size } },
    });
    return coloured({
      paper_bgcolor: "--ground",
      plot_bgcolor: "--ground",
      font: { color: "--ink", family: "system-ui, sans-serif", size },
      hoverlabel: { bgcolor: "--raised", bordercolor: "--ink", font: { color: "--ink" }, align: "left" },
      margin: { l: 50, r: 10, t: 10, b: 45 },
      dragmode: false,
      ...layout,
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis),
    });
  };

  // where the window changes plotly forgets the layout's height and takes the element's
  const draw = (element, traces, layout) => {
    element.style.height = `${layout.height}px`;
    Plotly.react(element, coloured(traces), framed(layout), config);
  };

  const ms = (ns) => ns / 1e6;
  const inWords = (ns) => {
    const units = [[1e6, "ms"], [1e9, "s"], [3.6e12, "h"], [8.64e13, "days", 3]]; // from 3 days on
    const isReached = ([scale, , least = 1]) => Math.abs(ns) >= least * scale;
    const [scale, unit] = units.findLast(isReached) ?? [1e3, "us"];
    return ns ? `${Number((ns / scale).toPrecision(4))} ${unit}` : "0 s";
  };
  const mib = (bytes) => `${Number((bytes / 1048576).toPrecision(4))} MiB`;
  const MOST_RING_STEPS = 400; // in view: more cannot be told apart

  // what the first and the last name of a bar begin with: its block, or the module itself
  const sharedOf = (names) => {
    const [first, last] = [names[0] ?? "", names.at(-1) ?? ""].map((name) => name.split("."));
    const differs = first.findIndex((part, i) => part !== last[i]);
    return first.slice(0, differs < 0 ? first.length : differs).join(".");
  };
  const nameOf = (comm) => (comm.bucket >= 0 ? `bucket ${comm.bucket}` : comm.operation);

  // traces and layout of some ranks in a view, and the stops of the arrow keys on the slowest one:
  // [trace, point, words]
  const timelineOf = ({ ranks, looks, view, hasRing }) => {
    // the bars of one row, a trace for each look
    const newRow = (y, width) => ({ y, width, traces: new Map() });
    const newTrace = (look) => ({
      type: "bar", orientation: "h", base: [], x: [], y: [], width: [], offset: [], text: [], hovertext: [],
      hoverinfo: "text", textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "inside",
      textfont: { color: look.text, size: isNarrow() ? 11 : 13, weight: look.hatched ? 700 : 400 },
      marker: {
        color: look.colour,
        line: { color: look.edge, width: [] },
        pattern: look.hatched
          ? { shape: "/", size: 7, solidity: 0.3, fillmode: "replace", fgopacity: 1, fgcolor: look.over, bgcolor: look.colour }
          : {},
      },
    });
    const addBar = (row, look, start, end, label, words, below = 0) => {
      if (!row.traces.has(look)) row.traces.set(look, newTrace(look));
      const trace = row.traces.get(look);
      trace.base.push(ms(start));
      trace.x.push(ms(end - start));
      trace.y.push(row.y);
      trace.width.push(row.width);
      trace.offset.push(-row.width / 2 - below);
      trace.text.push(label);
      trace.hovertext.push(words);
      trace.marker.line.width.push(end - start > (view[1] - view[0]) / 300 ? 0.75 : 0); // else all edge
      return [trace, trace.x.length - 1];
    };

    const wordsOf = (comm) => {
      const exposed = comm.exposed.reduce((sum, [start, end]) => sum + end - start, 0);
      const lines = [
        `<b>${nameOf(comm)}</b>: ${comm.operation} of ${mib(comm.size_bytes)}` +
          (comm.bucket >= 0 ? `, ${comm.num_params} parameters` : ""),
        `ready ${inWords(comm.ready_ns)}, joined ${inWords(comm.joined_ns)}, end ${inWords(comm.end_ns)}`,
        `in flight ${inWords(comm.end_ns - comm.joined_ns)}, exposed ${inWords(exposed)}`,
      ];
      if (comm.joined_ns > comm.ready_ns) lines.push(`queued ${inWords(comm.joined_ns - comm.ready_ns)} behind others`);
      if (comm.met_ns > comm.joined_ns) lines.push(`waits ${inWords(comm.met_ns - comm.joined_ns)} for late peers`);
      if (comm.ring_steps) lines.push(`${comm.ring_steps} ring steps of ${inWords((comm.end_ns - comm.ring_start_ns) / comm.ring_steps)}`);
      return lines.join("<br>");
    };

    // a collective as its hidden and exposed pieces
    const piecesOf = (comm) => {
      const pieces = [];
      let now = comm.joined_ns;
      for (const [start, end] of comm.exposed) {
        if (start > now) pieces.push(["hidden", now, start]);
        pieces.push(["exposed", start, end]);
        now = end;
      }
      if (comm.end_ns > now || !pieces.length) pieces.push(["hidden", now, comm.end_ns]);
      return pieces;
    };

    const addCollectives = (rank, yOf) => {
      const rows = new Map();
      for (const comm of rank.collectives) {
        if (!rows.has(comm.lane)) rows.set(comm.lane, [newRow(yOf(comm.lane), 0.62), newRow(yOf(comm.lane), 0.14)]);
        const [row, beneath] = rows.get(comm.lane);
        const words = wordsOf(comm);
        const pieces = piecesOf(comm);
        const longest = Math.max(...pieces.map(([, start, end]) => end - start));
        const labelled = pieces.findIndex(([, start, end]) => end - start === longest);
        pieces.forEach(([look, start, end], i) => {
          const hasRoom = i === labelled || end - start > (view[1] - view[0]) / 60;
          const label = hasRoom && comm.bucket >= 0 ? `${comm.bucket}` : "";
          const bar = addBar(row, looks[look], start, end, label, words);
          if (i === labelled && rank.is_slowest) stops.push([...bar, words]);
        });
        if (comm.joined_ns > comm.ready_ns) addBar(beneath, looks.queued, comm.ready_ns, comm.joined_ns, "", words, 0.41);
        if (comm.met_ns > comm.joined_ns) addBar(beneath, looks.late, comm.joined_ns, comm.met_ns, "", words, 0.41);
      }
      return [...rows.values()].flat();
    };

    // as many ring steps as can be told apart in what is in view, or a hint to zoom in
    const addRing = (rank, row) => {
      const steps = [];
      for (const comm of rank.collectives) {
        const length = (comm.end_ns - comm.ring_start_ns) / comm.ring_steps;
        for (let i = 0; i < comm.ring_steps; i += 1) {
          const start = comm.ring_start_ns + i * length;
          if (start < view[1] && start + length > view[0]) steps.push([comm, i, start, length]);
        }
      }
      if (steps.length > MOST_RING_STEPS) return `${steps.length} ring steps: zoom in to see them`;
      for (const [comm, i, start, length] of steps) {
        const words = `${nameOf(comm)}: ring step ${i + 1} of ${comm.ring_steps}, ${inWords(length)}`;
        addBar(row, looks[i % 2 ? "ring_odd" : "ring_even"], start, start + length, `${i + 1}`, words);
      }
      return "";
    };

    let stops = [];
    const rows = [];
    const ticks = [];
    const annotations = [];
    let y = 0;
    const place = (name, gap) => { y -= gap; ticks.push([y, name]); return y; };
    const addSpans = (spans, name, gap) => {
      const row = newRow(place(name, gap), 0.7);
      for (const [kind, start, end, names] of spans) {
        const look = looks[kind];
        const named = names.length ? `<br>${names.join(" ... ")}` : "";
        const words = `<b>${look.name}</b> ${inWords(end - start)}${named}<br>from ${inWords(start)} to ${inWords(end)}`;
        addBar(row, look, start, end, sharedOf(names) || look.short, words);
      }
      rows.push(row);
    };
    for (const rank of ranks) {
      addSpans(rank.compute, `${rank.label}<br>compute`, 1.35);
      if (rank.host.length) addSpans(rank.host, "host", 1);
      const lanes = [...new Set(rank.collectives.map((comm) => comm.lane))].sort((a, b) => a - b);
      const ys = new Map(lanes.map((lane, i) => [lane, place(lanes.length > 1 ? `comm ${i + 1}` : "comm", 1)]));
      rows.push(...addCollectives(rank, (lane) => ys.get(lane)));
      if (rank.is_slowest && hasRing && rank.collectives.some((comm) => comm.ring_steps)) {
        const ring = newRow(place("ring", 0.85), 0.4);
        const hint = addRing(rank, ring);
        if (hint) annotations.push({ text: hint, x: 0, xref: "paper", xanchor: "left", y, showarrow: false, font: { color: "--faint" } });
        rows.push(ring);
      }
    }
    const traces = rows.flatMap((row) => [...row.traces.values()]);
    stops = stops.map(([trace, point, words]) => [traces.indexOf(trace), point, words]);
    const layout = {
      height: Math.round(-y * 44 + 90),
      barmode: "overlay",
      showlegend: false,
      hovermode: "closest",
      hoverdistance: 5,
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      margin: { l: 60, r: 8, t: 8, b: 45 },
      uniformtext: { mode: "hide", minsize: 9 },
      annotations,
      xaxis: { title: { text: "ms from the start of the step on the slowest rank" }, range: view.map(ms), zeroline: false },
      yaxis: { range: [y - 0.6, -0.8], tickvals: ticks.map(([at]) => at), ticktext: ticks.map(([, name]) => name), fixedrange: true, showgrid: false, zeroline: false },
    };
    if (isNarrow()) layout.xaxis.title.text = "ms from the start of the step";
    return { traces, layout, stops };
  };

  return { css, draw, inWords, isNarrow, mib, ms, nameOf, timelineOf };
})();
