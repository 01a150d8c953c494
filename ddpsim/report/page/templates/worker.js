// The simulator in a browser, without a server: Pyodide, and the wheels that wheels.json lists.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const WITHOUT_NUMPY = "Without numpy, of which PyPI has no wheel for browsers, ranks that are unlike each "
  + "other, or that links set apart, are not simulated here; ddpsim explore does.";
const read = async (path) => {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply;
};
const load = async () => {
  postMessage({ note: "Python and ddpsim are being loaded: the first time this takes a while." });
  const names = await (await read("wheels.json")).json();
  const wheels = names.map(async (name) => (await read(`wheels/${name}`)).arrayBuffer());
  const python = await loadPyodide();
  for (const wheel of await Promise.all(wheels)) python.unpackArchive(wheel, "wheel");
  const answer = python.runPython("from ddpsim.explore.answer import json_answer; json_answer");
  postMessage({ note: names.some((name) => name.startsWith("numpy-")) ? "" : WITHOUT_NUMPY });
  return answer;
};
const loaded = load();
onmessage = async ({ data }) => {
  try {
    const answer = await loaded;
    postMessage({ answer: JSON.parse(answer(JSON.stringify(data))) });
  } catch (error) {
    postMessage({ note: `ddpsim cannot run in this browser: ${error}`, isBad: true });
  }
};
