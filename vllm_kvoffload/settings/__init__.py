"""All user options: their types, ranges and rules, and the error that names key, value, rule and fix.

Owns the parsing of `additional_config` and `kv_connector_extra_config`. Imports neither torch nor vLLM, nor
any higher layer of this package, so that platforms, connectors, CLI and tests apply the same rules.
"""
