"""The form of a reply without a model: request, grammar, masks, random tokens, reader.

Longer than 300 lines because it is a list of forms with what fits them and what does not.
"""

import json
import re

import jsonschema
import pytest

from common.errors import InvalidRequest
from tests.support.walks import (
    LIMITS,
    TOKENIZER,
    form,
    read,
    schema_form,
    tool_form,
    vocabulary,
    walk,
)

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    },
    "recursive": TREE,
    "values": {"enum": ["grün", "日本", 1, None, {"a": [True]}]},
    "any of": {
        "anyOf": [
            {"type": "integer", "minimum": -3, "maximum": 12},
            {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        ]
    },
    "counted": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "minProperties": 1,
        "additionalProperties": False,
    },
    "others": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "additionalProperties": {"type": "integer"},
        "required": ["a", "q"],
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
    "multiple": {"type": "integer", "multipleOf": 3, "minimum": -5, "maximum": 100},
    "pattern": {"type": "string", "pattern": "^[a-f]+(-[0-9]{2})?$"},
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "date": {"type": "string", "format": "date"},
    "type list": {"type": ["string", "null"]},
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_tokens_under_the_masks_follow_the_schema(name, seed):
    found = walk(schema_form(SCHEMAS[name]), seed)
    assert found.is_complete
    jsonschema.validate(json.loads(found.content), SCHEMAS[name])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_arguments_follow_the_parameters(name, seed):
    schema = SCHEMAS[name]
    parameters = {
        "type": "object",
        "properties": {"x": schema, "y": {"type": "integer"}},
        "required": ["x"],
        "$defs": schema.get("$defs", {}),
    }
    found = walk(tool_form(parameters), seed)
    assert found.is_complete and found.content == ""
    assert [name for name, _ in found.calls] == ["act"]
    jsonschema.validate(found.arguments, {**parameters, "additionalProperties": False})


PARAMETERS = {
    "others": {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 4}},
        "additionalProperties": {"type": "integer", "maximum": 99},
        "required": ["q"],
    },
    "texts": {
        "type": "object",
        "properties": {
            "enum": {"type": "string", "enum": ["", "a b", "ü"]},
            "when": {"type": "string", "format": "date-time"},
            "code": {"type": "string", "pattern": "^[A-C]{2}(-[0-9]+)?$", "maxLength": 6},
            "part": {"type": "string", "pattern": "x|y", "maxLength": 9},
        },
        "required": ["enum", "when", "code"],
    },
    "references": {
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/node"},
            "one": {"allOf": [{"$ref": "#/$defs/size"}], "description": "as pydantic writes it"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}], "default": None},
        },
        "required": ["tree", "one", "maybe"],
        "additionalProperties": False,
        "$defs": {**TREE["$defs"], "size": {"enum": ["s", "m", 3]}},
    },
    'keys with " and &': {
        "type": "object",
        "properties": {'say "a&b"': {"const": True}},
        "required": ['say "a&b"'],
    },
    "none": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_follow_parameters_of_every_kind(name, seed):
    found = walk(tool_form(PARAMETERS[name]), seed, most=800)
    if not found.is_complete:  # a part that is looked for anywhere may take its time
        assert name == "texts"
        return
    pairs = json.loads(found.calls[0][1], object_pairs_hook=list)
    assert len(dict(pairs)) == len(pairs), "an argument came twice"
    jsonschema.validate(found.arguments, PARAMETERS[name])


@pytest.mark.parametrize("seed", range(4))
def test_thoughts_are_free_and_the_response_is_not(seed):
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMAS["flat"]}}
    found = walk(form(response_format=wanted), seed, thinking=True)
    assert found.is_complete and found.reasoning
    jsonschema.validate(json.loads(found.content), SCHEMAS["flat"])


def test_a_response_that_skips_the_end_of_thoughts_is_constrained_all_the_same():
    matcher = vocabulary().compile(form(response_format={"type": "json_object"}).grammar)
    matcher.take(*TOKENIZER.encode_marked("<|open|>response<|sep|>"))
    assert allowed(matcher) <= {"{", '{"', "{}"}


@pytest.mark.parametrize("seed", range(4))
def test_an_object_has_no_long_run_of_blanks(seed):
    spaces = [TOKENIZER.encode(" ")[0], TOKENIZER.encode("\n")[0]]
    matcher = vocabulary().compile(schema_form({"type": "object"}).grammar)
    matcher.take(TOKENIZER.encode("{")[0])
    for _ in range(7):
        matcher.take(spaces[seed % 2])
    assert not matcher.why_lost
    assert not {" ", "\n", "  "} & allowed(matcher)


def test_every_byte_of_a_mask_keeps_the_answer_possible():
    matcher = vocabulary().compile(schema_form(SCHEMAS["flat"]).grammar)
    for token in TOKENIZER.encode('{"name": "a'):
        mask = matcher.mask()
        for other in range(0, TOKENIZER.vocab, 7):
            probe = matcher.copy()
            probe.take(other)
            assert bool(mask[other >> 3] >> (other & 7) & 1) == (not probe.why_lost)
        matcher.take(token)


@pytest.mark.parametrize(
    ("structured", "is_right"),
    [
        ({"regex": "(ja|nein)/[0-9]{2}"}, lambda t: re.fullmatch("(ja|nein)/[0-9]{2}", t)),
        (
            {"choice": ["a", "ab", "日本", "<|open|>"]},
            lambda t: t in ("a", "ab", "日本", "<|open|>"),
        ),
        ({"json": SCHEMAS["flat"]}, lambda t: isinstance(json.loads(t)["ok"], bool)),
        (
            {"grammar": 'root ::= "x" [0-9]{2,3} (" " tail)?  # comment\ntail ::= [^a-z0-9 ]'},
            lambda t: re.fullmatch(r"x[0-9]{2,3}( [^a-z0-9 ])?", t),
        ),
        (
            {"grammar": 'root ::= "(" root ")" | "ab" | "abc"'},
            lambda t: re.fullmatch(r"\(*(ab|abc)\)*", t) and t.count("(") == t.count(")"),
        ),
    ],
    ids=["regex", "choice", "json", "regular grammar", "recursive grammar"],
)
@pytest.mark.parametrize("seed", range(4))
def test_other_forms_are_followed(structured, is_right, seed):
    found = walk(form(structured_outputs=structured, reasoning_effort="none"), seed)
    assert found.is_complete and is_right(found.content)


def test_a_shorter_word_is_not_lost_to_a_longer_one():
    grammar = 'root ::= ("ab" | "abc") "cd" rest\nrest ::= "" | "." rest'
    source = form(structured_outputs={"grammar": grammar}, reasoning_effort="none").grammar
    for text in ("abcd", "abccd", "abcd.."):
        matcher = vocabulary().compile(source)
        matcher.take(*TOKENIZER.encode_marked(f"{text}<|close|>response<|sep|>"))
        assert not matcher.why_lost, text


ASK = [
    {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "wait"}},
]


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_names_a_declared_tool(seed):
    found = walk(form(tools=ASK, tool_choice="required"), seed, thinking=True)
    assert found.is_complete
    assert {name for name, _ in found.calls} <= {"ask", "wait"}
    assert all(isinstance(json.loads(text), dict) for _, text in found.calls)


@pytest.mark.parametrize("seed", range(4))
def test_a_named_choice_is_one_call_of_that_tool(seed):
    named = {"type": "function", "function": {"name": "wait"}}
    found = walk(form(tools=ASK, tool_choice=named), seed, thinking=True)
    assert found.is_complete and found.calls == [("wait", "{}")]


def test_strict_tools_are_followed_without_being_required():
    strict = [{"type": "function", "function": {**ASK[1]["function"], "strict": True}}]
    request = form(tools=strict, reasoning_effort="none")
    plain = reply(request, "Hello.<|close|>response<|sep|>")
    assert {"<|open|>", "<|close|>"} == allowed(plain)
    call = reply(request, '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="')
    assert all("wait".startswith(text) for text in allowed(call))


def test_strings_are_raw_and_keep_every_character():
    parameters = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    text = 'quotes " \\ <|open|> 日本\n{"a": 1}'
    tag = '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="act" index="1"<|sep|>'
    ids = [
        *TOKENIZER.encode_marked(f'{tag}<|open|>argument key="s" type="string"<|sep|>'),
        *TOKENIZER.encode(text),
        *TOKENIZER.encode_marked(
            "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
            "<|close|>message<|sep|><|end_of_msg|>"
        ),
    ]
    matcher = vocabulary().compile(tool_form(parameters).grammar)
    matcher.take(*ids)
    assert matcher.is_complete
    assert read(ids, True).arguments == {"s": text}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "properties": {"a": {"not": {}, "type": "string"}}}, "#/properties/a"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "https://example.com/x.json"}, "example.com"),
        ({"type": "array", "items": {"$ref": "#/$defs/none"}}, "#/$defs/none"),
        ({"$ref": "#"}, "leads only to itself"),
        ({"const": 2**70}, "64 bits"),
        ({"items": [{"type": "string"}]}, "prefixItems"),
        ({"type": "object", "required": "a"}, "`required` at #"),
        ({"type": "object", "required": [1]}, "`required` at #"),
        ({"type": "object", "properties": None}, "`properties` at #"),
        ({"anyOf": {"type": "string"}}, "`anyOf` at #"),
    ],
)
@pytest.mark.parametrize("where", ["response", "arguments"])
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(schema, said, where):
    if where == "arguments":
        schema = {"type": "object", "properties": {"x": {"type": "array", "items": schema}}}
        if said in ("#/properties/a", "leads only to itself"):
            said = "#/properties/x/items" if said.startswith("#") else "must lead into `$defs`"
    with pytest.raises(InvalidRequest, match=re.escape(said)) as refused:
        schema_form(schema) if where == "response" else tool_form(schema)
    assert refused.value.param


NODE = {"type": "object", "required": ["next"]}
NEXT = {"$ref": "#/$defs/node"}


def linked(**node) -> dict:
    """A schema of nodes; `node` changes what a node is."""
    node = NODE | {"properties": {"next": NEXT}} | node
    return {"$defs": {"node": node}, "type": "object", "properties": {"x": NEXT}}


@pytest.mark.parametrize(
    "schema",
    [
        linked(),
        linked(type="array", minItems=1, items=NEXT),
        linked(type="array", minItems=2, prefixItems=[{}], items=NEXT),
        linked(properties={"next": {"anyOf": [NEXT, {"allOf": [NEXT]}]}}),
        linked(properties={}, additionalProperties=NEXT),
    ],
)
def test_a_schema_that_only_something_endless_would_follow_is_refused(schema):
    for ask in (schema_form, tool_form):
        with pytest.raises(InvalidRequest, match=r"#/properties/x .*never ends"):
            ask(schema)


@pytest.mark.parametrize(
    "schema",
    [
        linked(required=[]),
        linked(type=["object", "null"]),
        linked(type="array", minItems=1, prefixItems=[{}], items=NEXT),
        linked(properties={"next": {"anyOf": [NEXT, {"type": "null"}]}}),
        linked(enum=[{"next": 1}]),
    ],
)
def test_a_schema_that_leads_back_to_itself_may_end(schema):
    assert schema_form(schema).grammar and tool_form(schema).grammar


def test_a_grammar_that_leads_back_to_itself_may_end():
    for text in ('root ::= "x" root?', 'root ::= ("x" root){0,1}', 'root ::= "(" root ")" | "y"'):
        assert form(structured_outputs={"grammar": text}).grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": 'start ::= "x"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= other"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'root ::= ("x"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "x" <[7]>'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "x" root'}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"grammar": 'root ::= "x" (a | b)+\na ::= [x] b\nb ::= a a?'}},
            "structured_outputs.grammar",
        ),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        form(**fields)
    assert refused.value.param == param


def test_no_form_can_name_a_control_token():
    for structured in (
        {"regex": f"<\\[{TOKENIZER.open}\\]>"},
        {"grammar": f'root ::= "<[{TOKENIZER.open}]>"'},
        {"choice": [f"<[{TOKENIZER.open}]>", '" <[1283]> "']},
    ):
        found = form(structured_outputs=structured, reasoning_effort="none")
        start = vocabulary().compile(found.grammar)
        assert not any(
            name.startswith("<|") and name in TOKENIZER.specials for name in allowed(start)
        )


def test_a_schema_cannot_loosen_its_own_rules():
    schema = {"type": "object", "x-guidance": {"lenient": True, "whitespace_pattern": " *"}}
    assert schema_form(schema).grammar == schema_form({"type": "object"}).grammar


def reply(found, text):
    matcher = vocabulary().compile(found.grammar)
    matcher.take(*TOKENIZER.encode_marked(text))
    assert not matcher.why_lost
    return matcher


def allowed(matcher) -> set[str]:
    mask = matcher.mask()
    return {
        TOKENIZER.name(i) or TOKENIZER.decode([i])
        for i in range(LIMITS.vocab)
        if mask[i >> 3] >> (i & 7) & 1
    }
