"""The demo's report: one HTML page that needs nothing else, not even a network."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from kvferry import __version__
from kvferry.tools.demo.compare import GAP_MEDIAN_SECONDS, Comparison, Figures, ServingWay
from kvferry.tools.demo.fleet import FleetFigures, FleetResult
from kvferry.tools.demo.policies import PoliciesResult, PolicyFigures
from kvferry.tools.demo.restart import LifeFigures, Restart
from kvferry.tools.plots import Part, Series, bar_plot, legend, line_plot
from kvferry.tools.top.words import show_bytes

NAMES = {
    ServingWay.ROOMY: "Big device",
    ServingWay.SMALL: "Small device",
    ServingWay.KVFERRY: "Small + kvferry",
}
_COLOURS = {
    ServingWay.ROOMY: "--roomy",
    ServingWay.SMALL: "--small",
    ServingWay.KVFERRY: "--kvferry",
}

Row = tuple[str, Callable[[Figures], str]]

ROWS: tuple[Row, ...] = (
    ("Device blocks", lambda f: f"{f.device_blocks:,}"),
    ("First token p50", lambda f: show_seconds(f.first_token_seconds(50))),
    ("First token p95", lambda f: show_seconds(f.first_token_seconds(95))),
    ("Tokens per second", lambda f: f"{f.tokens_per_second:,.0f}"),
    ("Prefill tokens computed", lambda f: f"{f.prefill_tokens:,}"),
    ("Hit rate, device", lambda f: f"{f.device_hit_rate:.0%}"),
    ("Hit rate, host", lambda f: f"{f.host_hit_rate:.0%}"),
    ("Moved device → host", lambda f: short_bytes(f.stored_bytes)),
    ("Moved host → device", lambda f: short_bytes(f.loaded_bytes)),
    ("Preemptions", lambda f: f"{f.num_preemptions:,}"),
    ("Run time", lambda f: f"{f.seconds:.1f} s"),
)
"""The table's lines, for the page and for the terminal."""


def show_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def short_bytes(count: float) -> str:
    if not count:
        return "–"
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def verdict(result: Comparison) -> str:
    """Whether the three runs agree, in one sentence."""
    figures = result.figures[ServingWay.ROOMY]
    if result.tokens_equal:
        return (
            f"All {len(figures.turns)} answers ({figures.generated_tokens:,} tokens) "
            "are identical in the three runs."
        )
    return (
        f"{result.num_different_turns} of {len(figures.turns)} answers differ between the runs: "
        "kvferry or the playground is broken, please report it."
    )


def gain(result: Comparison) -> str:
    """What kvferry bought, in one sentence."""
    return (
        f"On the same small device kvferry computed {result.prefill_ratio:.1f}x fewer prefill "
        f"tokens and gave the median first token {result.first_token_ratio:.1f}x sooner."
    )


def render(result: Comparison, more: str = "") -> str:
    """The whole page; ``more`` stands before the table of all figures."""
    return _PAGE.format(
        css=_CSS,
        version=__version__,
        verdict_class="good" if result.tokens_equal else "bad",
        verdict=escape(verdict(result)),
        cards=_cards(result),
        setting=_setting(result),
        by_turn=_by_turn(result),
        sources=_sources(result),
        spread=_spread(result),
        work=_work(result),
        legend=legend([(NAMES[way], _COLOURS[way]) for way in result.figures]),
        source_legend=legend(
            [
                ("found on the device", "--device"),
                ("loaded from host", "--host"),
                ("computed", "--computed"),
            ]
        ),
        table=_table(result),
        more=more,
    )


def _cards(result: Comparison) -> str:
    small, kvferry = result.figures[ServingWay.SMALL], result.figures[ServingWay.KVFERRY]
    cards = (
        (
            f"{result.prefill_ratio:.1f}×",
            "fewer prefill tokens computed",
            f"{small.prefill_tokens:,} → {kvferry.prefill_tokens:,}",
        ),
        (
            f"{result.first_token_ratio:.1f}×",
            "sooner first token, median",
            f"{show_seconds(small.first_token_seconds(50))} → "
            f"{show_seconds(kvferry.first_token_seconds(50))}",
        ),
        (
            f"{kvferry.host_hit_rate:.0%}",
            "of prompt tokens loaded from host",
            f"{show_bytes(kvferry.loaded_bytes)} loaded, {show_bytes(kvferry.stored_bytes)} stored",
        ),
    )
    return "".join(
        f'<div class="card"><b>{big}</b><span>{what}</span><small>{detail}</small></div>'
        for big, what, detail in cards
    )


def _setting(result: Comparison) -> str:
    setting, chat, shape = result.setting, result.setting.chat, result.setting.shape
    windows = [window for window in shape.windows if window is not None]
    layers = f"{shape.num_layers} layers"
    if windows:
        layers += f", {len(windows)} of them with a sliding window of {windows[0]} tokens"
    return escape(
        f"{chat.num_conversations} conversations of {chat.num_turns} turns, {chat.num_users} "
        f"answered at a time. Each opens with about {chat.opening_tokens} tokens; a turn adds "
        f"about {chat.question_tokens} of question and {chat.answer_tokens} of answer. Between "
        f"two turns of a conversation all the others come by. Together they need "
        f"{setting.working_set:,} blocks of {setting.block_tokens} tokens; the small device has "
        f"{setting.device_blocks:,}, {setting.working_set / setting.device_blocks:.1f} times too "
        f"few. The model is a numpy decoder ({layers}, width {shape.width}) with fixed random "
        f"weights; compute and copies run on threads of this machine's CPU."
    )


def _by_turn(result: Comparison) -> str:
    return line_plot(
        [
            Series(
                NAMES[way],
                _COLOURS[way],
                [(n + 1, s * 1000) for n, s in enumerate(figures.first_token_median_by_turn())],
                wide=way is ServingWay.ROOMY,
            )
            for way, figures in result.figures.items()
        ],
        x_label="turn of the conversation",
        y_label="median time to first token",
        show_y=lambda y: f"{_round(y)} ms",
    )


def _spread(result: Comparison) -> str:
    series = []
    for way, figures in result.figures.items():
        waits = sorted(turn.first_token_seconds * 1000 for turn in figures.turns)
        points = [(wait, (at + 1) / len(waits) * 100) for at, wait in enumerate(waits)]
        series.append(
            Series(
                NAMES[way],
                _COLOURS[way],
                [(0.0, 0.0), (waits[0], 0.0), *points],
                wide=way is ServingWay.ROOMY,
            )
        )
    return line_plot(
        series,
        x_label="time to first token, ms",
        y_label="share of turns",
        show_y=lambda y: f"{_round(y)}%",
        show_x=_round,
        markers=False,
    )


def _work(result: Comparison) -> str:
    series = []
    for way, figures in result.figures.items():
        total, points = 0, [(0.0, 0.0)]
        for number, turn in enumerate(figures.turns):
            total += turn.prefilled_tokens
            points.append((number + 1.0, float(total)))
        series.append(Series(NAMES[way], _COLOURS[way], points, wide=way is ServingWay.ROOMY))
    return line_plot(
        series,
        x_label="turns answered",
        y_label="prefill tokens computed so far",
        show_y=_thousands,
        markers=False,
    )


def _sources(result: Comparison) -> str:
    bars = [
        (
            NAMES[way],
            [
                Part("found on the device", "--device", figures.device_hit_tokens),
                Part("loaded from host", "--host", figures.host_hit_tokens),
                Part("computed", "--computed", figures.prefill_tokens),
            ],
        )
        for way, figures in result.figures.items()
    ]
    return bar_plot(bars, show=_thousands, x_label="prompt tokens")


def _thousands(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.4g}M"
    return f"{value / 1000:,.3g}k" if value >= 1000 else _round(value)


def _round(tick: float) -> str:
    """A place on an axis, with as many digits as tell it from its neighbours."""
    return f"{tick:,.10g}"


def _table(result: Comparison) -> str:
    columns = (
        ServingWay.KVFERRY,
        ServingWay.SMALL,
        ServingWay.ROOMY,
    )  # first what a narrow screen should show
    head = "".join(f'<th scope="col">{escape(NAMES[way])}</th>' for way in columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(show(result.figures[way]))}</td>" for way in columns)
        + "</tr>"
        for name, show in ROWS
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


_CSS = """
:root{color-scheme:light dark;--bg:#fbfbfa;--panel:#fff;--ink:#1d2329;--soft:#5d6873;
--edge:#e2e5e8;--grid:#e9ecee;--roomy:#7b8794;--small:#d9822b;--kvferry:#0f8b8d;
--device:#7b8794;--host:#0f8b8d;--computed:#d9822b;--good:#1a7f4b;--bad:#c0392b}
@media(prefers-color-scheme:dark){:root{--bg:#14181c;--panel:#1b2026;--ink:#e6e9ec;
--soft:#9aa5b0;--edge:#2b323a;--grid:#2a3138;--roomy:#93a1af;--small:#e69a4c;--kvferry:#35b5b0;
--device:#93a1af;--host:#35b5b0;--computed:#e69a4c;--good:#4cc38a;--bad:#ff7b6b}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1020px;margin:0 auto;padding:36px 20px 48px}
h1{font-size:26px;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:15px;margin:0 0 2px}
p{margin:0 0 14px;color:var(--soft);max-width:76ch}
.verdict{font-weight:600;margin:0 0 22px}.good{color:var(--good)}.bad{color:var(--bad)}
.cards,.plots{display:grid;gap:16px;margin-bottom:16px}
.cards{grid-template-columns:repeat(auto-fit,minmax(230px,1fr))}
.plots{grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr))}
.card,figure{background:var(--panel);border:1px solid var(--edge);border-radius:10px;
padding:16px 18px;margin:0}
.card b{display:block;font-size:34px;line-height:1.15;color:var(--kvferry);
font-variant-numeric:tabular-nums}
.card span{display:block}.card small{color:var(--soft);font-variant-numeric:tabular-nums}
figure p{font-size:13px;margin:0 0 8px}
svg{width:100%;max-width:540px;height:auto;display:block}
svg text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg text.name{font-size:12px;fill:var(--ink)}svg text.inside{fill:#fff;font-weight:600}
.grid{stroke:var(--grid);stroke-width:1}
.wide{stroke-width:7!important;opacity:.4}
.line{fill:none;stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;padding:0;margin:8px 0 0;
font-size:13px;color:var(--soft)}
.legend span{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.scroll{overflow-x:auto}figure+figure{margin-top:16px}.plots figure+figure{margin-top:0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:7px 10px;text-align:right;border-bottom:1px solid var(--edge)}
td{white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
th[scope=row]{text-align:left;font-weight:400;color:var(--soft)}
td:nth-child(2),thead th:nth-child(2){color:var(--kvferry);font-weight:600}
@media(max-width:600px){main{padding:20px 12px 32px}.card,figure{padding:14px 12px}
svg text{font-size:14px}svg text.name{font-size:15px}th,td{padding:6px 4px;font-size:13px}}
footer{color:var(--soft);font-size:13px;margin-top:22px}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>kvferry demo</title><style>{css}</style></head><body><main>
<h1>kvferry demo</h1>
<p>The same conversations, served three ways. A device too small for them forgets, and computes
again; with kvferry it forgets, and loads.</p>
<p class="verdict {verdict_class}">{verdict}</p>
<div class="cards">{cards}</div>
<div class="plots">
<figure><h2>Time to first token, turn by turn</h2>
<p>Without kvferry every turn computes the whole conversation again.</p>{by_turn}{legend}</figure>
<figure><h2>Where the prompt tokens came from</h2>
<p>Loading a block is a copy; computing it is the whole model.</p>{sources}{source_legend}</figure>
<figure><h2>How long people waited</h2>
<p>Share of turns whose first token came within a given time.</p>{spread}{legend}</figure>
<figure><h2>Prefill work</h2>
<p>Tokens computed so that answers could start.</p>{work}{legend}</figure>
</div>
{more}
<figure><h2>All figures</h2><div class="scroll">{table}</div></figure>
<footer><p>{setting}</p><p>kvferry {version}. Times are from this one run on this one machine;
on a shared machine expect them to vary.</p></footer>
</main></body></html>
"""


# ------------------------------------------------------------------------------------------------
# The part of the demo's report about servers that share a store: in words, a table, a plot.

WAYS = {"shared": "One store for all", "alone": "Each for itself"}

FleetRow = tuple[str, Callable[[FleetFigures], str]]

FLEET_ROWS: tuple[FleetRow, ...] = (
    ("First token p50", lambda fleet: show_seconds(fleet.first_token_seconds)),
    ("Prefill tokens computed", lambda fleet: f"{fleet.prefill_tokens:,}"),
    ("Read from the store", lambda fleet: short_bytes(fleet.read_bytes)),
    ("Turns by server", lambda fleet: _by_server(fleet)),
)


def fleet_verdict(result: FleetResult) -> str:
    """Whether sharing gave what each would have computed, in one sentence."""
    num_turns = len(result.alone.answers)
    if result.tokens_equal:
        return (
            f"All {num_turns} answers of {result.num_servers} servers are identical with the "
            "store and without."
        )
    return (
        f"{result.num_different_turns} of {num_turns} answers differ with the store: kvferry or "
        "the playground is broken, please report it."
    )


def fleet_gain(result: FleetResult) -> str:
    """What sharing bought, in a few sentences."""
    said = [f"Every turn went to one of {result.num_servers} servers, by chance."]
    if result.saved_share is None:
        said.append("Nothing was read from the store: this shows nothing of what sharing saves.")
    else:
        said.append(
            f"With one store for all they computed {result.shared.prefill_tokens:,} prefill tokens "
            f"instead of {result.alone.prefill_tokens:,}: sharing saved {result.saved_share:.0%}."
        )
    if result.shared.killed is not None:
        said.append(
            f"Server {result.shared.killed} was killed at half of the turns; what it had under "
            f"way ({len(result.shared.resent)}) the others answered, with the blocks that it had "
            "shared and the store still has."
        )
    if result.shared.ailment:
        said.append(f"The store was away for a while: {result.shared.ailment}.")
    return " ".join(said)


def fleet_columns(result: FleetResult) -> tuple[tuple[str, FleetFigures], ...]:
    return ((WAYS["shared"], result.shared), (WAYS["alone"], result.alone))


def fleet_section(result: FleetResult) -> str:
    """A figure for the page."""
    kinds = (
        ("found on the server's device", "--device"),
        ("loaded", "--host"),
        ("computed", "--computed"),
    )
    bars = [
        (
            name,
            [
                Part(*kinds[0], sum(turn.device_tokens for turn in fleet.turns)),
                Part(*kinds[1], sum(turn.host_tokens for turn in fleet.turns)),
                Part(*kinds[2], fleet.prefill_tokens),
            ],
        )
        for name, fleet in fleet_columns(result)
    ]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in fleet_columns(result))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(show(fleet))}</td>" for _, fleet in fleet_columns(result))
        + "</tr>"
        for name, show in FLEET_ROWS
    )
    style = "good" if result.tokens_equal else "bad"
    plot = bar_plot(bars, show=lambda value: f"{value:,.0f}", x_label="prompt tokens")
    return (
        f"<figure><h2>{result.num_servers} servers, one store</h2>"
        f"<p>{escape(fleet_gain(result))}</p>"
        f'<p class="verdict {style}">{escape(fleet_verdict(result))}</p>'
        f"{plot}{legend(list(kinds))}"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def _by_server(fleet: FleetFigures) -> str:
    counts = (fleet.answered_by.get(n, 0) for n in range(max(fleet.answered_by) + 1))
    marks = (f"{count}†" if n == fleet.killed else f"{count}" for n, count in enumerate(counts))
    return " + ".join(marks)


# ------------------------------------------------------------------------------------------------
# The part of the demo's report about eviction policies: in words, as a table, and as a plot.

PoliciesRow = tuple[str, Callable[[PolicyFigures], str]]

POLICIES_ROWS: tuple[PoliciesRow, ...] = (
    ("First token p50", lambda policy: _seconds(policy.first_token_seconds(50))),
    ("First token p95", lambda policy: _seconds(policy.first_token_seconds(95))),
    (
        "Processor's time to the first token of returns, mean",
        lambda policy: _seconds(policy.return_seconds),
    ),
    ("Prefill tokens computed", lambda policy: f"{policy.prefill_tokens:,}"),
    ("Host hit rate", lambda policy: f"{policy.host_hit_rate:.1%}"),
    ("Returns found in host memory", lambda policy: f"{policy.found_rate:.0%}"),
)

_SAME = 0.005
"""A difference below this share is none."""


def policies_verdict(result: PoliciesResult) -> str:
    """Whether what is kept changed any answer, in one sentence."""
    num_turns = result.trial.chat.num_turns
    names = " and ".join(result.figures)
    if result.tokens_equal:
        return f"All {num_turns:,} answers are identical with the policies {names}."
    return (
        f"{result.num_different_turns:,} of {num_turns:,} answers differ between the policies "
        f"{names}: kvferry or the playground is broken, please report it."
    )


def policies_gain(result: PoliciesResult) -> str:
    """What came out, the last policy against the first, whichever is better."""
    first, *_, last = result.figures.values()
    computed = _change(last.prefill_tokens, first.prefill_tokens)
    worked = _change(last.return_seconds, first.return_seconds)
    return (
        f"Conversations returned after {GAP_MEDIAN_SECONDS:.0f} s in the median, or never; host "
        f"memory held {result.trial.host_blocks} blocks. With the policy {last.policy} it had "
        f"{last.host_hit_rate:.1%} of the prompt tokens, with {first.policy} "
        f"{first.host_hit_rate:.1%}: {last.prefill_tokens:,} prefill tokens were computed instead "
        f"of {first.prefill_tokens:,}, {computed}. Until the first token of a conversation that "
        f"returned the processor worked {worked} in the mean."
    )


def policies_columns(result: PoliciesResult) -> tuple[tuple[str, PolicyFigures], ...]:
    """The last policy first: as in the report's other tables, what is compared with the rest."""
    return tuple(reversed(result.figures.items()))


def policies_section(result: PoliciesResult) -> str:
    """A figure for the page."""
    kinds = (
        ("found on the device", "--device"),
        ("loaded from host memory", "--host"),
        ("computed", "--computed"),
    )
    bars = [
        (
            name,
            [
                Part(*kinds[0], sum(turn.device_tokens for turn in figures.turns)),
                Part(*kinds[1], sum(turn.host_tokens for turn in figures.turns)),
                Part(*kinds[2], figures.prefill_tokens),
            ],
        )
        for name, figures in policies_columns(result)
    ]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in policies_columns(result))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(show(figures))}</td>" for _, figures in policies_columns(result))
        + "</tr>"
        for name, show in POLICIES_ROWS
    )
    style = "good" if result.tokens_equal else "bad"
    plot = bar_plot(bars, show=lambda value: f"{value:,.0f}", x_label="prompt tokens")
    return (
        f"<figure><h2>Which blocks are kept</h2><p>{escape(policies_gain(result))}</p>"
        f"<p>{escape(_how(result))}</p>"
        f'<p class="verdict {style}">{escape(policies_verdict(result))}</p>'
        f"{plot}{legend(list(kinds))}"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def _how(result: PoliciesResult) -> str:
    trial = result.trial
    return (
        f"Each policy, on a server of its own, answered the same {trial.chat.num_turns:,} turns, "
        "both in turn, one request at a time and the pauses between them skipped; the first "
        f"{trial.num_uncounted:,}, in which memory fills and a policy learns, are in no figure."
    )


def _change(new: float, old: float) -> str:
    share = new / old - 1
    if abs(share) < _SAME:
        return "about as much"
    return f"{abs(share):.0%} {'less' if share < 0 else 'more'}"


def _seconds(seconds: float) -> str:
    """Short ones: a model of this size answers in milliseconds."""
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


# ------------------------------------------------------------------------------------------------
# The part of the demo's report about a restart: in a sentence, as a table, and as a plot.

LIVES = {
    "before": "Before the restart",
    "warm": "Restarted, with disk",
    "cold": "Restarted, no disk",
}

RestartRow = tuple[str, Callable[[LifeFigures], str]]

RESTART_ROWS: tuple[RestartRow, ...] = (
    ("First token p50", lambda life: _restart_report_seconds(life.first_token_seconds)),
    ("Prefill tokens computed", lambda life: f"{life.prefill_tokens:,}"),
    ("Blocks found at the start", lambda life: f"{life.restored_blocks:,}"),
    ("Read from disk", lambda life: show_bytes(life.read_bytes) if life.read_bytes else "–"),
)


def restart_verdict(result: Restart) -> str:
    """Whether the disk gave back what was stored, in one sentence."""
    if result.tokens_equal:
        return (
            f"After the restart all {len(result.cold.answers)} answers are identical with the disk "
            "and without."
        )
    return (
        f"After the restart {result.num_different_turns} of {len(result.cold.answers)} answers "
        "differ with the disk: kvferry or the playground is broken, please report it."
    )


def restart_gain(result: Restart) -> str:
    """What the disk bought, in one sentence."""
    return (
        f"The server stopped, a new process found {result.warm.restored_blocks:,} blocks on disk "
        f"and its first turns hit {result.hit_rate:.0%} of their prompts: the median first token "
        f"came {result.first_token_ratio:.1f}x sooner than in a process that had to compute it all."
    )


def restart_columns(result: Restart) -> tuple[tuple[str, LifeFigures], ...]:
    return ((LIVES["warm"], result.warm), (LIVES["cold"], result.cold))


def restart_section(result: Restart) -> str:
    """A figure for the page."""
    kinds = (("from disk", "--host"), ("computed", "--computed"))
    bars = [
        (
            name,
            [
                Part(kinds[0][0], kinds[0][1], sum(turn.host_tokens for turn in life.turns)),
                Part(kinds[1][0], kinds[1][1], life.prefill_tokens),
            ],
        )
        for name, life in restart_columns(result)
    ]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in restart_columns(result))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(show(life))}</td>" for _, life in restart_columns(result))
        + "</tr>"
        for name, show in RESTART_ROWS
    )
    style = "good" if result.tokens_equal else "bad"
    plot = bar_plot(bars, show=lambda value: f"{value:,.0f}", x_label="prompt tokens")
    return (
        f"<figure><h2>After a restart</h2><p>{escape(restart_gain(result))}</p>"
        f'<p class="verdict {style}">{escape(restart_verdict(result))}</p>'
        f"{plot}{legend(list(kinds))}"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def _restart_report_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
