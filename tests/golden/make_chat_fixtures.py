#!/usr/bin/env python3
"""Writes the fixtures of tests/text/chat with Transformers (5.23) and Jinja2 (3.1.6).

    python3 tests/golden/make_chat_fixtures.py

conversations.json: what is rendered. rendered.json: every file of templates/ on every conversation, with and
without a generation prompt, and the assistant's spans (characters) where the template marks them; null where
the template refuses. snippets.json: small templates, one construct each, and what Transformers' environment
makes of them; null for an error.
"""
import datetime
import json
import pathlib

from transformers.utils import chat_template_utils as hf

HERE = pathlib.Path(__file__).resolve().parent.parent / "text" / "chat"


class FixedClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 12, 0, 0)


hf.datetime = FixedClock

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a place, <b>now</b> & later: 'ü'",
    "parameters": {"type": "object", "properties": {
        "place": {"type": "string", "description": "City \"name\""},
        "days": {"type": "integer", "minimum": 1, "default": 1.5, "nullable": None,
                 "deep": [1, True, {"a": []}, {}]}},
        "required": ["place"]}}}
TIME = {"type": "function", "function": {"name": "time", "description": "now",
                                         "parameters": {"type": "object", "properties": {}}}}

SEARCH = {"type": "function", "function": {"name": "search", "description": "Finds pages", "parameters": {
    "type": "object", "required": ["words"], "properties": {
        "words": {"type": "array", "items": {"type": "string"}, "description": "All of them"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "nullable": True},
        "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
        "filter": {"type": "object", "properties": {"site": {"type": "string"}, "tags": {
            "type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}}},
            "required": ["site"]},
        "long": {"type": "array", "items": {"type": "object", "properties": {
            "a_name_of_some_length": {"type": "number"}, "b": {}}}},
        "since": {"oneOf": [{"type": "string", "default": "today"}, {"type": "number"}]},
        "where": {"oneOf": [{"type": "object"}, {"type": "string"}]},
        "limit": {"type": ["integer", "null"]}, "any": {}, "list": {"type": "array"}}}}}


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def answer(content):
    return {"role": "tool", "content": content}


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather",
                                                            "arguments": {"place": "Zürich", "days": 2}}}
CONVERSATIONS = [
    {"messages": [user("Hello"), says("Hi there.")]},
    {"messages": [system("Be brief."), user("What is 2 + 2?"), says("4"), user("And 3 + 3?"), says("6")]},
    {"messages": [user("  leading and trailing  \n"), says("\n\n  indented\tanswer \n "), user("next"),
                  says("last ")]},
    {"messages": [system("Sei höflich 🙂"), user("¿Qué tal? 你好\u00a0мир"),
                  says("Très bien — 👍🏽 \u2028 done")]},
    {"messages": [user("{{ braces }} {% if %} <|im_end|> & < > ' \""),
                  says("\\n is not a line break; \"quoted\"")]},
    {"messages": [user("only a question")]},
    {"messages": [user(""), says("")]},
    {"messages": [user("a"), says("a"), user("a"), says("a"), user("a")]},
    {"messages": [user("one"), user("two"), says("three")]},
    {"messages": [says("I speak first"), user("oh")]},
    {"messages": [system("S"), system("again"), user("u"), says("a")]},
    {"messages": [user("Weather?"), says("", tool_calls=[CALL]),
                  {"role": "tool", "name": "get_weather", "content": "{\"sun\": true}",
                   "tool_call_id": "abcdefghi"},
                  says("Sunny.")], "tools": [WEATHER, TIME]},
    {"messages": [system("Tools are there."), user("Just talk."), says("Fine.")], "tools": [WEATHER]},
    {"messages": [user("Think."), says("<think>\nhm\n</think>\n\nDone."), user("More."),
                  says("Yes.", reasoning_content="second thought")]},
    {"messages": [user("u"), {"role": "stop", "content": "x"}, user("never seen")]},
    {"messages": [{"role": "developer", "content": "Be kind."}, user("Time and weather?"),
                  says("", tool_calls=[CALL], reasoning_content="Weather first."), answer("14 °C"),
                  says("", tool_calls=[{"function": {"name": "time", "arguments": {}}}],
                       reasoning_content="Now the \"time\"."), answer({"hour": 9}),
                  says("14 °C at 9.", reasoning_content="Both are known."), user("Thanks"),
                  says("With pleasure", reasoning_content="A farewell.")], "tools": [WEATHER, SEARCH, TIME],
     "chat_template_kwargs": {"reasoning_effort": "high", "identity": "I am a test."}},
    {"messages": [user("Search!"), says("I search.", tool_calls=[{"name": "search", "arguments": "x"}]),
                  answer("nothing")], "tools": [SEARCH]},
]

# One construct each. The variables: see VARIABLES.
VARIABLES = {"name": "World", "n": 7, "f": 2.5, "neg": -7, "none": None, "yes": True,
             "text": "  Hello, wide World!\n", "empty": "", "list": [3, 1, 2, 1],
             "words": ["beta", "Alpha", "gamma", "alpha"], "uni": "Straße 🙂 éa",
             "table": {"b": 1, "a": {"x": [1, 2]}, "items": "shadow"},
             "people": [{"name": "Ann", "age": 30, "tags": ["x"]}, {"name": "Bob", "age": 25},
                        {"name": "Cid", "age": 30, "tags": []}]}
SNIPPETS = r"""
Hello {{ name }}!
{{ 1 + 2 * 3 - 4 }} {{ 7 // 2 }} {{ neg // 2 }} {{ neg % 3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ -n ** 2 }} {{ +n }}
{{ 1.0 }} {{ 1e3 }} {{ 1e16 }} {{ 1.5e-5 }} {{ 0.1 + 0.2 }} {{ 100000.0 * 10 }} {{ f * 2 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 1_000 }}
{{ 'a' ~ 1 ~ none ~ yes ~ missing ~ 2.0 }}|{{ 'ab' * 3 }}|{{ [1, 2] + [3] }}|{{ (1, 2) + (3,) }}|{{ [0] * 3 }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 == 1.0 }} {{ true == 1 }} {{ none == false }} {{ 'a' != "a" }}
{{ not yes or n and name }} {{ n and name }} {{ empty or 'x' }} {{ none or empty or 0 }}
{{ 'World' in name }} {{ 3 in list }} {{ 'b' in table }} {{ 'z' not in table }} {{ 1 not in list }} {{ 'x' in missing }}
{{ 'yes' if n > 5 else 'no' }}|{{ 'yes' if n > 50 }}|{{ 'a' if n > 50 else 'b' if n > 6 else 'c' }}
{{ list }} {{ table }} {{ ['a', "it's", 'q"', 'b\\\n\t', 'é', none, 1.0, ('t',), {}] }}
{{ list[0] }} {{ list[-1] }} {{ list[9] }} {{ list[1:] }} {{ list[:-1] }} {{ list[::-1] }} {{ list[::2] }} {{ list[5:1] }} {{ list[-2:] }} {{ list[3:0:-2] }}
{{ uni[0] }}{{ uni[-1] }}{{ uni[4] }}{{ uni[7] }} {{ uni[2:6] }} {{ uni[::-1] }} {{ name[10:] }}
{{ table.b }} {{ table['b'] }} {{ table.a.x[1] }} {{ table['a']['x'] | length }} {{ table['items'] }} {{ table.get('b') }} {{ table.get('zz', 5) }} {{ table.get('zz') }} {{ table.nothing }}
{% for k, v in table.items() %}{{ k }}={{ v }};{% endfor %} {{ table.keys() | list }} {{ table.values() | list }} {% for k in table %}{{ k }}{% endfor %}
{% for k, v in table | items %}{{ loop.index }}{{ k }}{% endfor %} {{ table | dictsort }} {{ table | length }}
{% for x in list %}{{ loop.index }}/{{ loop.length }}:{{ x }}{% if not loop.last %}, {% endif %}{% endfor %}
{% for x in list %}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.previtem }}-{{ loop.nextitem }} {% endfor %}
{% for x in [] %}never{% else %}empty{% endfor %}{% for x in missing %}never{% else %} undefined{% endfor %}
{% for x in list if x > 1 %}{{ loop.index }}:{{ x }} {% endfor %}
{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{% if loop.index == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for a, b in [(1, 2), [3, 4]] %}{{ a + b }} {% endfor %}{% for c in 'añb' %}{{ c }}.{% endfor %}
{% for x in list %}{% for y in list %}{{ loop.depth }}{% endfor %}{{ loop.depth0 }}{% endfor %}
{% set x = 1 %}{% for i in list %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}
{% set ns = namespace(total=0, seen=[]) %}{% for i in list %}{% set ns.total = ns.total + i %}{% set ns.seen = ns.seen + [i] %}{% endfor %}{{ ns.total }} {{ ns.seen }} {{ ns.none is defined }}
{% set a, b = 1, 'two' %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}
{% set block %}<{{ name }}>{% endset %}{{ block }}{{ block | length }}{% set up | upper | trim %} {{ name }} {% endset %}{{ up }}
{% if missing %}a{% elif n == 7 %}b{% else %}c{% endif %}{% if none is none and missing is not defined %}d{% endif %}
{% macro greet(who, greeting='Hi', mark=greeting|length) %}{{ greeting }} {{ who }}{{ mark }}{% endmacro %}{{ greet('Ann') }};{{ greet('Bob', 'Yo') }};{{ greet(who='C', mark='!') }};{{ greet() }}
{% macro fact(k) %}{% if k <= 1 %}1{% else %}{{ k * fact(k - 1) | int }}{% endif %}{% endmacro %}{{ fact(10) }}
{% macro outer() %}{{ later }}{% endmacro %}{% set later = 'set after' %}{{ outer() }}
{{ name | upper }} {{ name | lower }} {{ 'hello wide-world (of x)' | title }} {{ 'hello wide-world it\'s' .title() }} {{ 'hELLO' | capitalize }} {{ 'hELLO'.capitalize() }} {{ uni | upper | lower }}
[{{ text | trim }}] [{{ text.strip() }}] [{{ text.lstrip() }}] [{{ text.rstrip() }}] [{{ 'xxaxx'.strip('x') }}] [{{ 'xyaxy' | trim('xy') }}] [{{ '\u00a0é\u3000'.strip() }}]
{{ 'a,b,,c'.split(',') }} {{ '  a  b '.split() }} {{ 'a b c d'.split(' ', 2) }} {{ 'a b c d'.rsplit(' ', 1) }} {{ '  a  b c '.split(none, 1) }} {{ 'a\nb\r\nc'.splitlines() }} {{ ''.split(',') }} {{ ''.split() }}
{{ 'a\vb\fc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\r\n\nj\r'.splitlines() }} {{ '\x1fa\u00a0'.splitlines() }}
{{ name.startswith('Wo') }} {{ name.endswith(('x', 'ld')) }} {{ name.replace('o', '0') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'aaa' | replace('a', 'bb') }} {{ 'ab'.replace('', '-') }}
{{ name.find('r') }} {{ name.find('q') }} {{ 'aXbX'.rfind('X') }} {{ 'banana'.count('an') }} {{ '-'.join(['a', 'b']) }} {{ '12'.isdigit() }} {{ ' '.isspace() }} {{ 'prefix'.removeprefix('pre') }} {{ 'suffix'.removesuffix('fix') }}
{{ list | join(', ') }} {{ people | join('/', attribute='name') }} {{ list | first }} {{ list | last }} {{ [] | first }} {{ list | sort }} {{ list | unique | list }} {{ words | sort }} {{ words | unique | list }} {{ list | sort(reverse=true) }}
{{ people | map(attribute='name') | list }} {{ words | map('upper') | join }} {{ people | map(attribute='tags', default='none') | list }} {{ list | map('string') | list }}
{{ people | selectattr('age', 'equalto', 30) | map(attribute='name') | list }} {{ people | rejectattr('tags') | list | length }} {{ people | selectattr('tags', 'defined') | list | length }} {{ list | select('odd') | list }} {{ list | reject('in', [1]) | list }} {{ list | select | list }} {{ people | sort(attribute='age,name') | map(attribute='name') | list if false else 'x' }}
{{ missing | default('d') }} {{ empty | default('d') }}| {{ empty | default('d', true) }} {{ none | default('d') }} {{ missing | d('short') }} {{ empty | default('d', boolean=true) }} {{ missing | default }}|
{{ table | tojson }} {{ list | tojson(indent=2) }} {{ "é<>&'\"\\\n\u0001" | tojson }} {{ uni | tojson(ensure_ascii=true) }} {{ [1.0, 1e20, none, true, 1e-7] | tojson }} {{ {} | tojson(indent=4) }} {{ table | tojson(separators=(',', ':')) }} {{ table | tojson(sort_keys=true) }}
{{ table | tojson(indent=4) }}
{{ '3.7' | int }} {{ '3' | int + 1 }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.99 | int }} {{ '2.5' | float }} {{ 'x' | float(1.5) }} {{ 3 | float }} {{ 3.456 | round(2) }} {{ 2.5 | round }} {{ 2.1 | round(method='ceil') }} {{ neg | abs }} {{ list | sum }} {{ people | sum(attribute='age') }} {{ list | max }} {{ words | min }}
{{ n is defined }} {{ missing is undefined }} {{ none is none }} {{ name is string }} {{ table is mapping }} {{ list is iterable }} {{ name is iterable }} {{ n is iterable }} {{ list is sequence }} {{ table is sequence }} {{ n is number }} {{ f is float }} {{ n is integer }} {{ yes is boolean }} {{ yes is true }} {{ n is true }} {{ false is false }} {{ yes is integer }}
{{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ n is eq 7 }} {{ n is ne(8) }} {{ n is gt 3 }} {{ n is ge 7 }} {{ n is lt 3 }} {{ n is le 7 }} {{ 1 is in list }} {{ n is sameas n }} {{ n is equalto 7 }} {{ 'a' is lower }} {{ 'A' is upper }} {{ n is not odd }} {{ not n is odd }}
{{ range(3) | list }} {{ range(1, 7, 2) | list }} {{ range(3, 0, -1) | list }} {{ dict(a=1, b='x') }} {{ namespace(a=1).a }}
{{ strftime_now('%d %b %Y') }} {{ strftime_now is defined }} {{ raise_exception is defined }}
{{ raise_exception('no') }}
  {% if true %}
    indented {{ name }}
  {% endif %}  
after
a  {%- if true -%}  b  {%- endif -%}  c {{- ' d ' -}} e
{# gone #}   x {#- gone -#}   y
{% raw %}{{ not run }} {% if %}{% endraw %} {{ '{{' }} {{ "}}" }} {{ {'a': {'b': 1}} }}
{{ '\x41\u00e9\n\t\\ \q \'' }}|{{ "two" "parts" }}|{{ 'line \
continued' }}
{{ missing.attribute }}
{{ none.attribute }}|{{ name.nothing }}|{{ n.x }}
{{ missing + 1 }}
{{ 'a' + 1 }}
{{ [1] + 'a' }}
{{ 1 // 0 }}
{{ missing() }}
{{ n() }}
{{ {} | first }} {{ 'abc' | first }} {{ 'abc' | list }} {{ 'abc' | reverse }} {{ list | reverse | list }} {{ 'a' | indent }} {{ 'a\n\nb' | indent(2) }} {{ 'a\nb' | indent(2, true) }}
{{ list.count(1) }} {{ list.index(2) }}
{{ list.append(4) }}
{{ table | tojson | safe }} {{ '<a & b>' | safe ~ '<' }}
{{ (1,) }} {{ () }} {{ (1) }} {{ [1, 2,] }} {{ {'a': 1,} }}
{{ 1, 2 }}
{{ table.a['x'].0 }} {{ list.1 }}
{{ -1 | abs }} {{ -f | abs }} {{ (-1) | abs }}
{{ 'a' if true }}{{ 'b' if false }}c
{% if 'a' in 'abc' and not 'z' in 'abc' %}ok{% endif %}
{% for i in range(3) %}{% if loop.nothing is defined %}{% endif %}{{ i }}{% endfor %}
{%- for message in people %}{{ '<' + message['name'] + '>' }}{% if loop.last and add_generation_prompt %}!{% endif %}{% endfor %}
{% generation %}{{ name }}{% endgeneration %}
{% unknown_tag %}
{{ name | no_such_filter }}
{{ name is no_such_test }}
{% for x in list %}no end
{{ name
{% if %}{% endif %}
{{ 'unclosed }}
{{ a b }}
{% set true = 1 %}
{{ [1, 2 }}
"""


def snippets():
    lines = SNIPPETS.strip("\n").split("\n")
    joined = {"  {% if true %}": 4, "{{ '\\x41": 2}  # those of several lines
    result, at = [], 0
    while at < len(lines):
        count = next((n for start, n in joined.items() if lines[at].startswith(start)), 1)
        result.append("\n".join(lines[at:at + count]))
        at += count
    # White space and line breaks that a list of lines cannot show.
    return result + ["a\r\nb\rc\n", "{% if true %}\n\n x\n{% endif %}\n\n", "\n{{ name }}\n\n",
                     "x\n  {%+ if true %}y{% endif +%}\nz", "{% raw -%}\n a {%- endraw %}\n b",
                     "  {# c #}\n  {#- d #}\n e", "{% set x %}\n  a\n{% endset %}\n[{{ x }}]",
                     "{%- macro m(a) %}\n  <{{ a }}>\n{%- endmacro %}\n{{ m(1) }}\n{{ m(2) }}", "", "\n",
                     "{{''}}\n"]


def render(template, conversation, prompt):
    try:
        texts, spans = hf.render_jinja_template(
            [conversation["messages"]], tools=conversation.get("tools"), chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask="{% generation %}" in template, **SPECIALS,
            **conversation.get("chat_template_kwargs", {}))
    except Exception:
        return None
    result = {"text": texts[0]}
    if spans:
        result["spans"] = [list(span) for span in spans[0]]
    return result


def main():
    dump = lambda name, value: (HERE / name).write_text(
        json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    dump("conversations.json", CONVERSATIONS)
    rendered = {}
    for path in sorted((HERE / "templates").glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        rendered[path.stem] = [[render(template, c, prompt) for prompt in (False, True)]
                               for c in CONVERSATIONS]
        refused = sum(one[0] is None for one in rendered[path.stem])
        print(f"{path.stem}: {len(CONVERSATIONS) - refused} rendered, {refused} refused")
    dump("rendered.json", rendered)
    results = []
    for snippet in snippets():
        try:
            text = hf._compile_jinja_template(snippet).render(**VARIABLES)
        except Exception as error:
            text = None
            print("error:", repr(snippet[:60]), type(error).__name__, str(error)[:80])
        results.append([snippet, text])
    dump("snippets.json", {"variables": VARIABLES, "snippets": results})


if __name__ == "__main__":
    main()
