"""A Ray cluster of two nodes of one CPU each, on this machine. Prints its address, then obeys lines of its input.

`remove`: the second node is lost, with all its processes. End of input: the cluster ends.
"""

import sys

import ray
from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=SMALL)
    second = cluster.add_node(**SMALL)
    cluster.wait_for_nodes()
    print(cluster.address, second.raylet_socket_name, flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(second, allow_graceful=False)
            print("removed", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
