"""``[tls]``: the certificates of a cluster's processes.

Knows nothing of what is in them.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from baton.cluster.sections.base import Section


class TlsConfig(Section):
    """Names certificates (PEM files): ``dir`` is a folder made by `baton certs`; or give ``cert``, ``key`` and
    ``ca``.

    TLS is off when both are empty. Inside the cluster both ends show a certificate of ``ca``, which must carry the
    name of the role: ``router.<domain>`` or ``worker.<domain>``.
    """

    dir: str = Field(default="", description="folder of `baton certs`; for the roles of one machine")
    cert: str = Field(default="", description="this process's certificate, with its chain")
    key: str = Field(default="", description="its key")
    ca: str = Field(default="", description="the CAs of the cluster's own certificates")
    domain: str = Field(
        default="baton.internal",
        pattern=r"^[a-z0-9.-]{1,200}$",
        description="of roles' names; lower-case letters, digits, . or -",
    )
    public_cert: str = Field(default="", description="the router's certificate for clients; empty: its own")
    public_key: str = Field(default="", description="its key")
    client_ca: str = Field(default="", description="CA of the certificate that clients must show; empty: none")
    client_names: tuple[str, ...] = Field(default=(), description="DNS names of which it must carry one")
    trusted_network: bool = Field(
        default=False, description="the network between workers is trusted: KV may go by what can't be encrypted"
    )

    @property
    def enabled(self) -> bool:
        """Returns whether TLS is configured."""
        return bool(self.dir or self.cert)

    @model_validator(mode="after")
    def _whole(self) -> TlsConfig:
        named = {"cert": self.cert, "key": self.key, "ca": self.ca}
        if any(named.values()) and not all(named.values()):
            missing = ", ".join(name for name, path in named.items() if not path)
            raise ValueError(f"tls.cert, tls.key and tls.ca belong together: {missing} is missing")
        if self.dir and self.cert:
            raise ValueError("give tls.dir, or tls.cert, tls.key and tls.ca; not both")
        if bool(self.public_cert) != bool(self.public_key):
            raise ValueError("tls.public_cert and tls.public_key belong together")
        if (self.public_cert or self.client_ca) and not self.enabled:
            raise ValueError("tls.public_cert and tls.client_ca need tls.dir, or tls.cert, tls.key and tls.ca")
        if self.client_names and not self.client_ca:
            raise ValueError("tls.client_names needs tls.client_ca")
        return self
