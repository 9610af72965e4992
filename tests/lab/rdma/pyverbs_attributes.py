"""What rdma-core's own Python binding says of the RDMA devices, as one line of JSON. Debian: python3-pyverbs.

/usr/bin/python3 tests/lab/rdma/pyverbs_attributes.py
"""

import json

from pyverbs.device import Context, get_device_list

DEVICE = (
    "node_guid",
    "max_mr_size",
    "vendor_id",
    "vendor_part_id",
    "max_qp",
    "max_qp_wr",
    "max_sge",
    "max_sge_rd",
    "max_cq",
    "max_cqe",
    "max_mr",
    "max_qp_rd_atom",
    "max_qp_init_rd_atom",
    "phys_port_cnt",
    "fw_version",
)
PORT = ("state", "max_mtu", "active_mtu", "gid_tbl_len", "max_msg_sz", "pkey_tbl_len", "lid", "lmc")
PORT_TOO = ("active_width", "active_speed", "link_layer")


def describe(name):
    """Attributes of a device, of its first port, and of the port's GIDs."""
    with Context(name=name) as context:
        device = context.query_device()
        port = context.query_port(1)
        gids = [
            [entry.gid_index, entry.gid_str(), entry.gid_type, entry.ndev_ifindex]
            for entry in context.query_gid_table(256)
            if entry.port_num == 1
        ]
        return {
            "device": {key: text_or_number(getattr(device, key)) for key in DEVICE},
            "port": {key: getattr(port, key) for key in (*PORT, *PORT_TOO)},
            "gids": gids,
        }


def text_or_number(value):
    """A value as JSON holds it."""
    return value.decode() if isinstance(value, bytes) else value


print(json.dumps({device.name.decode(): describe(device.name.decode()) for device in get_device_list()}))
