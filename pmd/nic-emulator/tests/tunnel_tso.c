/*
 * Sends each received packet back with TCP segmentation inside a tunnel of a kind that the NIC need not know
 * (RTE_MBUF_F_TX_TUNNEL_UDP, RTE_MBUF_F_TX_TUNNEL_IP). The driver of DPDK then passes the offsets of the headers. The
 * source address of a packet has their lengths:
 *
 *   byte 1   flags: 1 outer IPv6, 2 inner IPv6, 4 outer UDP
 *   byte 2   outer IP header
 *   byte 3   everything between the outer and the inner IP header
 *   byte 4   inner IP header
 *   byte 5   TCP header
 *
 * Usage: tunnel_tso EAL_ARGUMENTS -- MSS
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_ether.h>
#include <rte_mbuf.h>

#define OFFLOADS                                                                                             \
	(RTE_ETH_TX_OFFLOAD_IPV4_CKSUM | RTE_ETH_TX_OFFLOAD_TCP_CKSUM | RTE_ETH_TX_OFFLOAD_OUTER_IPV4_CKSUM | \
	 RTE_ETH_TX_OFFLOAD_TCP_TSO | RTE_ETH_TX_OFFLOAD_UDP_TNL_TSO | RTE_ETH_TX_OFFLOAD_IP_TNL_TSO)

static void check(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s\n", what, rte_strerror(-result));
		exit(1);
	}
}

static void describe(struct rte_mbuf *packet, uint16_t mss, const struct rte_ether_addr *own)
{
	struct rte_ether_hdr *link = rte_pktmbuf_mtod(packet, struct rte_ether_hdr *);
	const uint8_t *lengths = link->src_addr.addr_bytes;
	uint64_t flags = RTE_MBUF_F_TX_TCP_SEG;

	flags |= lengths[1] & 1 ? RTE_MBUF_F_TX_OUTER_IPV6 : RTE_MBUF_F_TX_OUTER_IPV4 | RTE_MBUF_F_TX_OUTER_IP_CKSUM;
	flags |= lengths[1] & 2 ? RTE_MBUF_F_TX_IPV6 : RTE_MBUF_F_TX_IPV4 | RTE_MBUF_F_TX_IP_CKSUM;
	flags |= lengths[1] & 4 ? RTE_MBUF_F_TX_TUNNEL_UDP : RTE_MBUF_F_TX_TUNNEL_IP;
	packet->ol_flags = flags;
	packet->outer_l2_len = RTE_ETHER_HDR_LEN;
	packet->outer_l3_len = lengths[2];
	packet->l2_len = lengths[3];
	packet->l3_len = lengths[4];
	packet->l4_len = lengths[5];
	packet->tso_segsz = mss;
	link->dst_addr = link->src_addr;
	link->src_addr = *own;
}

int main(int argc, char **argv)
{
	struct rte_eth_conf config = {.rxmode.mtu = 9000, .txmode.offloads = OFFLOADS};
	struct rte_ether_addr own;
	struct rte_mempool *pool;
	uint16_t mss;
	int taken = rte_eal_init(argc, argv);

	check(taken, "rte_eal_init");
	if (argc - taken != 2) {
		fprintf(stderr, "usage: tunnel_tso EAL_ARGUMENTS -- MSS\n");
		return 1;
	}
	mss = atoi(argv[taken + 1]);
	pool = rte_pktmbuf_pool_create("packets", 2048, 0, 0, 9400, SOCKET_ID_ANY);
	check(pool ? 0 : -rte_errno, "rte_pktmbuf_pool_create");
	check(rte_eth_dev_configure(0, 1, 1, &config), "rte_eth_dev_configure");
	check(rte_eth_rx_queue_setup(0, 0, 256, SOCKET_ID_ANY, NULL, pool), "rte_eth_rx_queue_setup");
	check(rte_eth_tx_queue_setup(0, 0, 256, SOCKET_ID_ANY, NULL), "rte_eth_tx_queue_setup");
	check(rte_eth_dev_start(0), "rte_eth_dev_start");
	check(rte_eth_macaddr_get(0, &own), "rte_eth_macaddr_get");
	puts("started");
	fflush(stdout);
	for (;;) {
		/* The driver receives at least four packets at a time, or none. */
		struct rte_mbuf *packets[32];
		uint16_t n = rte_eth_rx_burst(0, 0, packets, 32);

		for (uint16_t i = 0; i < n; i++) {
			/* The kernel at the other end sends multicast. */
			if (rte_pktmbuf_mtod(packets[i], uint8_t *)[0] & 1) {
				rte_pktmbuf_free(packets[i]);
				continue;
			}
			describe(packets[i], mss, &own);
			if (rte_eth_tx_burst(0, 0, &packets[i], 1) == 0) {
				fprintf(stderr, "a packet was refused\n");
				return 1;
			}
		}
	}
}
