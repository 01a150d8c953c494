"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const { draw, isNarrow, ms, timelineOf } = drawing;

  const drawFigures = () => {
    for (const [id, { data: traces, layout }] of Object.entries(data.figures)) draw(byId(`drawing-${id}`), traces, layout);
  };

  // an upright A4 page is narrower than most windows, and what is wider is cut off
  const PAPER = 680;
  const resize = (size) => { for (const element of all(".drawing")) Plotly.relayout(element, size(element)); };
  addEventListener("beforeprint", () => resize((element) => ({ width: Math.min(PAPER, element.clientWidth) })));
  addEventListener("afterprint", () => resize(() => ({ autosize: true, width: null })));

  if (!data.timeline) {
    drawFigures();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawFigures);
    document.documentElement.dataset.drawn = "yes";
    return;
  }

  const { choices, looks } = data.timeline;
  const timeline = byId("drawing-timeline");
  const slider = byId("cap");
  let choice = Number(slider.value);
  // the time axis, ticks: of the scenario's own step, longer where another is
  const own = choices[Number(slider.defaultValue)].span_ns;
  let whole = own;
  let view = [...whole];
  let spokenOf = -1;
  let stops = []; // of the arrow keys, the slowest rank's collectives: [trace, point, words]

  const shownRanks = () => {
    const wanted = byId("rank").value;
    const { ranks } = choices[choice];
    if (wanted === "all") return ranks;
    return ranks.filter((rank) => (wanted === "slowest" ? rank.is_slowest : rank.ranks.includes(Number(wanted))));
  };


  const drawTimeline = () => {
    const { traces, layout, stops: found } = timelineOf({ ranks: shownRanks(), looks, view, hasRing: true });
    stops = found;
    draw(timeline, traces, layout);
  };

  const show = (range) => { view = range; drawTimeline(); };
  const zoom = {
    all: () => show([...whole]),
    in: () => { const quarter = (view[1] - view[0]) / 4; show([view[0] + quarter, view[1] - quarter]); },
    out: () => { const half = (view[1] - view[0]) / 2; show([Math.max(whole[0], view[0] - half), Math.min(whole[1], view[1] + half)]); },
    left: () => { const by = Math.min((view[1] - view[0]) / 4, view[0] - whole[0]); show(view.map((at) => at - by)); },
    right: () => { const by = Math.min((view[1] - view[0]) / 4, whole[1] - view[1]); show(view.map((at) => at + by)); },
  };

  const choose = () => {
    choice = Number(slider.value);
    spokenOf = -1;
    const isWhole = view[0] === whole[0] && view[1] === whole[1];
    const { span_ns: now } = choices[choice];
    whole = [Math.min(own[0], now[0]), Math.max(own[1], now[1])];
    if (isWhole) view = [...whole];
    for (const part of all("[data-choice]")) part.hidden = Number(part.dataset.choice) !== choice;
    byId("cap-shown").textContent = choices[choice].spoken;
    slider.setAttribute("aria-valuetext", choices[choice].spoken);
    byId("spoken").textContent = "";
    drawTimeline();
  };

  // the keyboard's way to hover: from one collective of the slowest rank to the next
  const walk = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !stops.length) return;
    event.preventDefault();
    spokenOf = Math.min(Math.max(spokenOf + by, 0), stops.length - 1);
    const [curveNumber, pointNumber, words] = stops[spokenOf];
    Plotly.Fx.hover(timeline, [{ curveNumber, pointNumber }]);
    byId("spoken").textContent = words.replace(/<br>/g, "; ").replace(/<[^>]*>/g, "");
  };

  const drawAll = () => { drawTimeline(); drawFigures(); };
  if (isNarrow()) byId("rank").value = "slowest";
  drawAll();
  slider.addEventListener("input", choose);
  byId("rank").addEventListener("change", drawTimeline);
  timeline.addEventListener("keydown", walk);
  for (const button of all("[data-zoom]")) button.addEventListener("click", zoom[button.dataset.zoom]);
  timeline.on("plotly_relayout", (change) => {
    const range = change["xaxis.range"] || (change["xaxis.range[0]"] !== undefined && [change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    if (range) show(range.map((at) => Number(at) * 1e6));
    else if (change["xaxis.autorange"]) show([...whole]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.documentElement.dataset.drawn = "yes";
})();
