"""Keywords of JSON Schema by what their values are."""

# The value maps names to schemas.
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# The value is no schema and has none inside it.
NOT_SCHEMAS = ("const", "enum", "default", "examples", "required", "$comment", "title", "description")
