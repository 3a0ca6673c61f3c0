"""Tools of the ``proxy`` benchmark: a trivial SSE engine, a naive relay and a load generator."""
