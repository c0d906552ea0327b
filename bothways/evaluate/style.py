"""How a report looks: light and dark by the reader's own setting, wide and narrow; it names no file and no address.

Systems have the colours s0 (the base, grey) to s6, chosen to stay apart for colour-blind readers in both modes; text
has a contrast of at least 4.5 to 1. What is greyed or coloured is also said by shape, line or word.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #fcfbf9; --card: #ffffff; --ink: #1c2027; --muted: #5b6370; --line: #dedbd4; --grid: #ebe8e2;
  --tint: #f4f1ea; --lead: #0f5f9e; --mark: #fbe6c8;
  --s0: #59616d; --s1: #0b6db7; --s2: #c9540a; --s3: #0b8062; --s4: #a8478a; --s5: #8a6a00; --s6: #6a5acd;
  --first: #3d4a5c; --on-first: #ffffff; --second: #c9d1dc; --on-second: #1c2027;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14171b; --card: #1b1f25; --ink: #e7e9ec; --muted: #a3abb7; --line: #343b45; --grid: #282e36;
    --tint: #22272f; --lead: #7cc0f5; --mark: #5a4215;
    --s0: #aab2bd; --s1: #63b3f0; --s2: #ff9a5c; --s3: #45c9a1; --s4: #e79aca; --s5: #e0bd4d; --s6: #aca3ff;
    --first: #c3ccd9; --on-first: #14171b; --second: #465161; --on-second: #f1f3f5;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--bg); color: var(--ink); line-height: 1.55; font-size: 1rem;
  font-family: -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif;
}
main { max-width: 56rem; margin: 0 auto; padding: 3.5rem 1.5rem 5rem; }
h1, h2 {
  font-family: Charter, "Iowan Old Style", "Palatino Linotype", Georgia, "Liberation Serif", serif; font-weight:
  600;
}
h1 {
  font-size: clamp(1.7rem, 1.2rem + 2.2vw, 2.5rem); line-height: 1.18; margin: .4rem 0 .8rem; overflow-wrap:
  anywhere; text-wrap: balance;
}
h2 { font-size: 1.4rem; line-height: 1.25; margin: 3.6rem 0 .5rem; }
h3 { font-size: 1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
p { max-width: 42rem; margin: .5rem 0; text-wrap: pretty; }
.eyebrow, .facts, .small-print, figcaption, .about { color: var(--muted); }
.eyebrow { font-size: .85rem; letter-spacing: .04em; margin: 0; }
.detail { font-size: 1.12rem; }
.facts {
  display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; padding: 0; margin: 1.1rem 0 0; list-style: none;
  font-size: .92rem;
}
.facts b { color: var(--ink); font-weight: 600; }
.small-print { font-size: .88rem; }
.note { border-left: 3px solid var(--s2); padding-left: .8rem; }

.scroll { overflow-x: auto; margin: 1.1rem 0 .6rem; }
table {
  border-collapse: separate; border-spacing: 0; width: 100%;
  font-variant-numeric: tabular-nums lining-nums; font-size: .95rem;
}
th, td { padding: .5rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
thead th {
  font-weight: 500; color: var(--muted); font-size: .85rem; border-bottom: 1px solid var(--line);
  vertical-align: bottom;
}
tbody tr:last-child > * { border-bottom: 1px solid var(--line); }
th:first-child, td:first-child {
  text-align: left; padding-left: 0; position: sticky; left: 0; background: var(--bg);
}
th:last-child, td:last-child { padding-right: .2rem; }
tbody th { font-weight: 500; }
tbody th .name {
  display: inline-block; max-width: 18rem; overflow: hidden; text-overflow: ellipsis; vertical-align: bottom;
}
tr.leads th, tr.leads td.main { font-weight: 700; }
.m { display: inline-block; width: 1.1em; text-align: left; color: var(--muted); font-weight: 500; }
.tag {
  font-size: .75rem; color: var(--muted); border: 1px solid var(--line); border-radius: 1rem; padding: 0 .5rem;
  margin-left: .5rem; font-weight: 400;
}
.faint { color: var(--muted); }

figure { margin: 1.6rem 0 0; }
figcaption { font-size: .92rem; max-width: 42rem; margin-top: .5rem; }
figcaption b { color: var(--ink); font-weight: 600; }
.legend {
  display: flex; flex-wrap: wrap; gap: .25rem 1.3rem; padding: 0; margin: 0 0 .6rem; list-style: none;
  font-size: .9rem;
}
.legend li { display: flex; align-items: center; gap: .45rem; min-width: 0; overflow-wrap: anywhere; }
.mark { width: 28px; height: 14px; flex: none; }
.plot { display: block; width: 100%; height: auto; }
.plot.narrow { display: none; max-width: 30rem; }
.plot text { fill: var(--ink); font-size: 13px; font-variant-numeric: tabular-nums; }
.plot .tick, .plot .axis { fill: var(--muted); }
.plot .small { fill: var(--muted); font-size: 12px; }
.plot .value { font-weight: 600; }
.plot .mid { text-anchor: middle; }
.plot .end { text-anchor: end; }
.grid { stroke: var(--grid); fill: none; }
.zero { stroke: var(--muted); stroke-dasharray: 4 4; fill: none; }
.first { fill: var(--first); }
.second { fill: var(--second); }
.plot .in-first { fill: var(--on-first); }
.plot .in-second { fill: var(--on-second); }
.c0 { --c: var(--s0); } .c1 { --c: var(--s1); } .c2 { --c: var(--s2); } .c3 { --c: var(--s3); }
.c4 { --c: var(--s4); } .c5 { --c: var(--s5); } .c6 { --c: var(--s6); }
.line { stroke: var(--c); stroke-width: 2; fill: none; stroke-linejoin: round; }
.c0 .line { stroke-dasharray: 5 4; }
.full { fill: var(--c); }
.hollow { fill: var(--bg); stroke: var(--c); stroke-width: 2; }
.span { stroke: var(--c); stroke-width: 2; fill: none; }

.example {
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .9rem 1.1rem; margin:
  .8rem 0;
}
.example dl { display: grid; grid-template-columns: 7.2rem minmax(0, 1fr); gap: .3rem .9rem; margin: 0; }
.example dt { color: var(--muted); font-size: .85rem; padding-top: .12rem; }
.example dd { margin: 0; overflow-wrap: anywhere; }
.example .where { color: var(--muted); font-size: .82rem; margin: 0 0 .5rem; max-width: none; }
.example dt.won { color: var(--lead); font-weight: 700; }
.example dt.ours { color: var(--ink); font-weight: 600; }
.example .score {
  color: var(--muted); font-size: .82rem; font-variant-numeric: tabular-nums; white-space: nowrap; margin-left:
  .5rem;
}
.example mark {
  background: var(--mark); color: inherit; border-radius: .2rem; padding: 0 .12em; text-decoration: underline;
  text-decoration-thickness: 1px; text-underline-offset: .2em;
}
.example hr { grid-column: 1 / -1; width: 100%; border: 0; border-top: 1px solid var(--grid); margin: .25rem 0; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
summary .faint { font-weight: 400; }

.recipe {
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .4rem 1.3rem 1.3rem;
  font-size: .9rem;
}
.recipe h3 { margin-top: 1.2rem; }
.recipe dl {
  display: grid; grid-template-columns: minmax(6.5rem, 10rem) minmax(0, 1fr); gap: .2rem 1rem; margin: 0;
}
.recipe dt { color: var(--muted); }
.recipe dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
code {
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; font-size: .88em;
  overflow-wrap: anywhere;
}

@media (max-width: 46rem) {
  main { padding: 2rem 1rem 3rem; }
  h2 { margin-top: 2.8rem; }
  .plot.wide { display: none; }
  .plot.narrow { display: block; }
  tbody th .name { max-width: 9.5rem; }
  .example dl, .recipe dl { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .example dd, .recipe dd { margin-bottom: .5rem; }
  .example hr { display: none; }
}
@media print {
  main { max-width: none; padding: 0; }
  figure, .example, table { break-inside: avoid; }
}
"""
