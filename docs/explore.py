"""A notebook to explore a scenario: `pip install marimo`, then `marimo edit docs/explore.py`."""

import marimo

app = marimo.App(width="medium", app_title="ddpsim: explore a scenario")


@app.cell
def _():
    import marimo as mo
    import plotly.graph_objects as go

    import ddpsim
    from ddpsim.scenario.starters import preset_files, presets

    return ddpsim, go, mo, preset_files, presets


@app.cell
def _(mo, preset_files, presets):
    names = [name for name in presets() if not preset_files(name)]
    scenario = mo.ui.dropdown(names, value="resnet50-2x8-25gbit", label="scenario")
    cap = mo.ui.slider(
        steps=[1, 2, 5, 10, 25, 50, 100, 250], value=25, label="bucket cap (MiB)", show_value=True
    )
    nodes = mo.ui.slider(steps=[1, 2, 4, 8, 16], value=2, label="nodes", show_value=True)
    view = mo.ui.checkbox(label="gradient_as_bucket_view")
    mo.vstack(
        [
            mo.md("# Explore a scenario\n\nEvery change simulates again; nothing is measured."),
            mo.hstack([scenario, nodes]),
            mo.hstack([cap, view]),
        ]
    )
    return cap, nodes, scenario, view


@app.cell
def _(cap, ddpsim, nodes, scenario, view):
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from ddpsim.scenario.starters import copy_preset

    settings = [
        f"cluster.nodes={nodes.value}",
        f"ddp.bucket_cap_mb={cap.value}",
        f"ddp.gradient_as_bucket_view={str(view.value).lower()}",
    ]
    with TemporaryDirectory() as folder:
        file, _ = copy_preset(scenario.value, Path(folder))
        asked = ddpsim.load_scenario(file, settings)
        caps = ddpsim.sweep(
            file,
            ddpsim.Grid.of([settings[0], settings[2], "ddp.bucket_cap_mb=1,2,5,10,25,50,100,250"]),
        )
    result = ddpsim.simulate(asked)
    return caps, result


@app.cell
def _(mo, result):
    _interval = result.prediction_interval_s
    _spread = (
        f"{_interval.low * 1e3:.1f} to {_interval.high * 1e3:.1f} ms" if _interval else "unknown"
    )
    mo.md(
        f"""
        **{result.iteration_time_s.mean * 1e3:.2f} ms a step** (80 % interval {_spread}),
        {result.throughput_samples_per_s:,.0f} samples/s on {result.world_size} GPUs,
        {result.scaling_efficiency:.0%} of one device without DDP.

        Bottleneck: {result.bottleneck.kind}, {result.bottleneck.text}
        """
    )


@app.cell
def _(go, result):
    parts = {
        "forward": result.breakdown_s.forward,
        "backward": result.breakdown_s.backward_compute,
        "exposed communication": result.breakdown_s.exposed_comm,
        "optimizer": result.breakdown_s.optimizer,
        "data wait": result.breakdown_s.data_wait,
        "other": result.breakdown_s.other,
    }
    breakdown = go.Figure(
        [go.Bar(y=["step"], x=[s * 1e3], name=name, orientation="h") for name, s in parts.items()],
        {"barmode": "stack", "height": 220, "xaxis": {"title": "ms"}, "title": "Where it goes"},
    )
    breakdown
    return (breakdown,)


@app.cell
def _(caps, go):
    sizes = [point.settings[0].value for point in caps.points]
    steps_ms = [point.brief.iteration_time_s.mean * 1e3 for point in caps.points]
    curve = go.Figure(
        [go.Scatter(x=sizes, y=steps_ms, mode="lines+markers")],
        {
            "title": "Step by bucket cap",
            "xaxis": {"title": "bucket_cap_mb (MiB)", "type": "category"},
            "yaxis": {"title": "ms", "rangemode": "tozero"},
        },
    )
    curve
    return (curve,)


@app.cell
def _(caps, mo):
    from ddpsim.result import sweep as _sweep

    _flat = caps.flat_regions()[0]
    mo.md(
        f"Best: **{caps.best.settings[0].value} MiB**. Within {100 * _sweep.FLAT:g} % of it: "
        f"{', '.join(value for (value,) in _flat.values)}."
    )


if __name__ == "__main__":
    app.run()
