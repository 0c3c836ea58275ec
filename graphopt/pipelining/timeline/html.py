"""Schedules as one HTML page that needs nothing else: a picture and a table of each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from graphopt.pipelining.timeline.slots import KIND_NAMES, RankFigures, ScheduleTimes, Slot
from graphopt.pipelining.timeline.text import percent, seconds_text, summary

_ZOOMS = (1, 2, 4, 8)
_SLOT_PIXELS, _MOST_PIXELS = 7, 30_000
"""Width that a usual slot gets at least, as long as the picture is not wider than the other."""


def page(schedules: Sequence[ScheduleTimes]) -> str:
    """The page. All pictures have the same scale of time, so that they can be compared."""
    title = ", ".join(dict.fromkeys(times.schedule for times in schedules))
    end = max(times.step_seconds for times in schedules)
    sections = "\n".join(_section(times, end) for times in schedules)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Pipeline schedule: {escape(title)}</title>
<style>{_STYLE}{_zoom_style()}</style>
</head>
<body>
<h1>Pipeline schedule{"s" * (len(schedules) > 1)}</h1>
<fieldset class="zoom"><legend>Width of the time axis</legend>{_zoom_buttons()}</fieldset>
{_legend(schedules)}
<main>
{sections}
</main>
<p class="note">A slot shows its microbatch; pointing at it shows its stage and times. Of the stages
of a rank every second one is dark. The bubble share is the share of all ranks' time, between the
first start and the last end, in which they run nothing.</p>
</body>
</html>
"""


def _section(times: ScheduleTimes, end: float) -> str:
    shares = f"bubble share <b>{percent(times.bubble_share)}</b>"
    if times.imbalance_share >= 0.0005:
        shares += f", of it {percent(times.imbalance_share)} because ranks have unequal work"
    heading = f"{escape(times.schedule)}, {times.origin}"
    return f"""<section>
<h2>{heading}</h2>
<p>{times.num_ranks} ranks, {times.microbatches} microbatches, step
<b>{seconds_text(times.step_seconds)}</b>, {shares}</p>
<div class="scroll" tabindex="0" role="region" aria-label="{heading}, picture">
<div class="chart" role="img" aria-label="{escape(summary(times))}; the table has the figures"
 style="--least:{_least_pixels(times, end)}px">
{_axis(end)}
{_rows(times, end)}
</div>
</div>
{_table(times)}
{_actions(times)}
</section>"""


def _rows(times: ScheduleTimes, end: float) -> str:
    return "\n".join(
        f'<div class="row"><span class="name">rank {figures.rank}'
        f"<small>{percent(figures.bubble_share)} idle</small></span>"
        f'<div class="time">{"".join(_slots(times, figures, end))}</div></div>'
        for figures in times.ranks
    )


def _slots(times: ScheduleTimes, figures: RankFigures, end: float) -> list[str]:
    local = {stage: index for index, stage in enumerate(figures.stages)}
    return [
        f'<i class="{slot.kind}{" odd" * (local[slot.stage] % 2)}"'
        f' style="left:{_share(slot.start - times.start, end)};width:{_share(slot.seconds, end)}"'
        f' title="{_hover(slot, times.start)}"><b>{slot.microbatch}</b></i>'
        for slot in times.by_rank[figures.rank]
    ]


def _hover(slot: Slot, start: float) -> str:
    return (
        f"{slot.action}: {KIND_NAMES[slot.kind]} of microbatch {slot.microbatch} in stage"
        f" {slot.stage}, rank {slot.rank}&#10;{seconds_text(slot.start - start)} to"
        f" {seconds_text(slot.end - start)}: {seconds_text(slot.seconds)}"
    )


def _axis(end: float) -> str:
    step = _tick_step(end)
    # The last label must not stand out over the end.
    count = int(0.97 * end / step) if step else 0
    ticks = "".join(
        f'<span style="left:{_share(index * step, end)}">{seconds_text(index * step)}</span>'
        for index in range(count + 1)
    )
    return (
        f'<div class="row axis" aria-hidden="true"><span class="name"></span>'
        f'<div class="time">{ticks}</div></div>'
    )


def _tick_step(end: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are 5 to 12 ticks."""
    if not end:
        return 0.0
    power = 10.0 ** (len(f"{int(end * 1e9)}") - 1 - 9)
    steps = (factor * power for factor in (0.1, 0.2, 0.5, 1.0, 2.0))
    return next(step for step in steps if end / step <= 12)


def _table(times: ScheduleTimes) -> str:
    kinds = [kind for kind in KIND_NAMES if any(slot.kind == kind for slot in times.slots)]
    heads = ["rank", "stages", "busy", "idle", "bubble share", *(KIND_NAMES[k] for k in kinds)]
    rows = [
        [
            str(figures.rank),
            ", ".join(map(str, figures.stages)),
            seconds_text(figures.busy),
            seconds_text(figures.idle),
            percent(figures.bubble_share),
            *(seconds_text(figures.by_kind.get(kind, 0.0)) for kind in kinds),
        ]
        for figures in times.ranks
    ]
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _actions(times: ScheduleTimes) -> str:
    lines = "\n".join(
        f"rank {rank}: {' '.join(str(slot.action) for slot in slots)}"
        for rank, slots in enumerate(times.by_rank)
    )
    return f"<details><summary>Actions in order</summary><pre>{lines}</pre></details>"


def _legend(schedules: Sequence[ScheduleTimes]) -> str:
    used = {slot.kind for times in schedules for slot in times.slots}
    entries = "".join(
        f'<li><i class="{kind}"></i>{kind}: {name}</li>'
        for kind, name in KIND_NAMES.items()
        if kind in used
    )
    return f'<ul class="legend">{entries}<li><i class="idle"></i>idle</li></ul>'


def _least_pixels(times: ScheduleTimes, end: float) -> int:
    usual = statistics.median(slot.seconds for slot in times.slots)
    return min(_MOST_PIXELS, round(end / usual * _SLOT_PIXELS)) if usual else 0


def _share(seconds: float, end: float) -> str:
    return f"{100 * seconds / end:.4g}%" if end else "0%"


def _zoom_buttons() -> str:
    names = {"fit": "fit", **{f"zoom{zoom}": f"{zoom}&times;" for zoom in _ZOOMS}}
    return "".join(
        f'<label><input type="radio" name="zoom" id="{key}"{" checked" * (key == "zoom1")}>'
        f" {name}</label>"
        for key, name in names.items()
    )


def _zoom_style() -> str:
    return "body:has(#fit:checked) .chart{min-width:100%}\n" + "".join(
        f"body:has(#zoom{zoom}:checked){{--zoom:{zoom}}}\n" for zoom in _ZOOMS
    )


_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b2430;--soft:#5b6675;--line:#d8dde4;
--idle:#f1f3f6;--stripe:#e2e6ec;--F:#9cc3f5;--B:#8fd6a8;--I:#7fd4cf;--W:#f5c77e;
--F2:#2f62ac;--B2:#25713f;--I2:#14696a;--W2:#8a5a10;--onlight:#12202f;--ondark:#fff}
@media (prefers-color-scheme:dark){:root{--paper:#14181e;--ink:#e5e9ef;--soft:#a0abb9;
--line:#39414c;--idle:#1d232b;--stripe:#28303a;--F:#8ab4ea;--B:#7fc999;--I:#6fc6c1;--W:#e6b86f}}
body{--zoom:1;background:var(--paper);color:var(--ink);margin:0 auto;padding:1.5rem;
max-width:110rem;font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0 0 .75rem}h2{font-size:1.1rem;margin:2rem 0 0}p{margin:.2rem 0 .6rem}
.note{color:var(--soft);max-width:70ch;margin-top:2rem}
.zoom{border:0;padding:0;margin:0 0 .5rem;display:flex;gap:1rem;flex-wrap:wrap}
.zoom legend{float:left;padding:0 1rem 0 0;color:var(--soft)}
.legend{list-style:none;padding:0;margin:0;display:flex;gap:1.25rem;flex-wrap:wrap}
.legend i{position:static;display:inline-block;width:1.6em;height:1em;margin-right:.4em;
vertical-align:-.1em}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px;padding:0 0 .4rem}
.scroll:focus-visible{outline:2px solid var(--F2)}
.chart{min-width:max(calc(100%*var(--zoom)),calc(var(--least)*var(--zoom)))}
.row{display:flex;height:28px;margin-top:3px}
.name{flex:0 0 6.5rem;position:sticky;left:0;z-index:1;background:var(--paper);padding:0 .6rem;
line-height:14px;font-size:12px;font-weight:600}
.name small{display:block;font-weight:400;color:var(--soft);font-size:11px}
.time{position:relative;flex:1;margin-right:.6rem}
.row:not(.axis) .time,.idle{background:repeating-linear-gradient(135deg,var(--idle) 0 4px,
var(--stripe) 4px 5px)}
.axis{height:22px}
.axis .time span{position:absolute;padding-left:3px;border-left:1px solid var(--line);
font-size:11px;line-height:22px;color:var(--soft);white-space:nowrap}
.time i{position:absolute;top:0;bottom:0;overflow:hidden;box-sizing:border-box;
border-right:1px solid var(--paper);container-type:inline-size;font-style:normal;text-align:center}
.time b{font:600 11px/28px system-ui,sans-serif}
@container (max-width:15px){.time b{display:none}}
.F{background:var(--F)}.B{background:var(--B)}.I{background:var(--I)}.W{background:var(--W)}
.F,.B,.I,.W{color:var(--onlight)}
.F.odd{background:var(--F2)}.B.odd{background:var(--B2)}.I.odd{background:var(--I2)}
.W.odd{background:var(--W2)}.odd{color:var(--ondark)}
table{border-collapse:collapse;margin:.75rem 0;font-variant-numeric:tabular-nums}
th,td{white-space:nowrap;padding:.15rem .9rem .15rem 0;text-align:right;
border-bottom:1px solid var(--line)}
thead th{color:var(--soft);font-weight:500}
details pre{overflow-x:auto;font-size:12px;background:var(--idle);padding:.6rem;border-radius:6px}
@media print{.zoom,details{display:none}.scroll{overflow:visible}}
"""
