"""kvferry inside vLLM: a KV connector, loaded by name through an entry point.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "kvferry", "kv_role": "kv_both",
                                            "kv_connector_extra_config": {"host": "64GiB"}}'

Only this package imports vllm, and only when vllm asks for it.
"""

from __future__ import annotations

CONNECTOR_NAME = "kvferry"


def register() -> None:
    """Register the connector with vLLM, which calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:  # vLLM may load plugins twice
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "kvferry.connectors.vllm.connector", "KvferryConnector"
        )
