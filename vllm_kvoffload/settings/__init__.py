"""Every option that a user gives: types, ranges, rules, and the error that names key, value, rule and fix.

Owns the parsing of `additional_config` and `kv_connector_extra_config`. Imports neither torch nor vLLM, and
nothing of this package above it, so that platforms, connectors, CLI and tests apply the very same rules.
"""
