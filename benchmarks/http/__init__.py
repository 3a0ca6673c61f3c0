"""What the ``proxy`` benchmark needs: a trivial SSE engine, a naive relay and a load generator."""
