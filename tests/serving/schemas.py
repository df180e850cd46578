"""Hypothesis strategies from an OpenAPI description: what fits a schema, and what nearly does."""

from typing import Any

from hypothesis import strategies as st

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -(10**400), 2**63, float("nan"), float("inf"), -0.0, 1e308])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\x00", "\ud800", "a" * 5000, "../../etc", "\r\nX-Evil: 1", "{{ 7 * 7 }}"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


class Schemas:
    """Values of the schemas of one description."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._named = description["components"]["schemas"]

    def body(self, name: str, fixed: dict[str, Any]) -> st.SearchStrategy[Any]:
        """Bodies of the schema `name`: right values, a few of them replaced or added.

        `fixed` is there more often than not, so that not everything fails for the same reason.
        """
        fields: dict[str, Any] = self._named[name]["properties"]
        right = st.fixed_dictionaries(
            {}, optional={key: self.value(schema) for key, schema in fields.items()}
        )
        wrong = st.dictionaries(st.sampled_from(sorted(fields)) | st.text(max_size=9), JUNK)
        few = st.dictionaries(st.sampled_from(sorted(fields)), JUNK, max_size=1)
        return st.builds(
            lambda a, b, c: a | b | c, right, st.just(fixed) | st.just({}), few | wrong
        )

    def value(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """What fits `schema`: the part of JSON Schema that pydantic writes for our models."""
        if "$ref" in schema:
            return self.value(self._named[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return st.one_of(*map(self.value, schema["anyOf"]))
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            needed = set(schema.get("required", ()))
            parts = {key: self.value(inner) for key, inner in schema["properties"].items()}
            return st.fixed_dictionaries(
                {key: part for key, part in parts.items() if key in needed},
                optional={key: part for key, part in parts.items() if key not in needed},
            )
        if kind == "array":
            least, items = schema.get("minItems", 0), self.value(schema.get("items", {}))
            return st.lists(items, min_size=least, max_size=least + 2)
        if kind == "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        if kind == "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False)
        if kind == "string":
            least = schema.get("minLength", 0)
            return st.text(min_size=least, max_size=least + 20)
        simple = {"boolean": st.booleans(), "null": st.none()}
        return simple.get(str(kind), JUNK)
