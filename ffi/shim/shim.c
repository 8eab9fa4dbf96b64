#define _GNU_SOURCE /* fopencookie */

#include "shim.h"

#include <stdio.h>
#include <string.h>

#include <rte_cycles.h>
#include <rte_log.h>

uint16_t sluice_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **packets, uint16_t count)
{
	return rte_eth_rx_burst(port, queue, packets, count);
}

uint16_t sluice_tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **packets, uint16_t count)
{
	return rte_eth_tx_burst(port, queue, packets, count);
}

int sluice_alloc_bulk(struct rte_mempool *pool, struct rte_mbuf **packets, unsigned int count)
{
	return rte_pktmbuf_alloc_bulk(pool, packets, count);
}

unsigned int sluice_ring_enqueue(struct rte_ring *ring, struct rte_mbuf **packets, unsigned int count)
{
	return rte_ring_enqueue_burst(ring, (void **)packets, count, NULL);
}

unsigned int sluice_ring_dequeue(struct rte_ring *ring, struct rte_mbuf **packets, unsigned int count)
{
	return rte_ring_dequeue_burst(ring, (void **)packets, count, NULL);
}

/* As rte_pktmbuf_pool_create_by_ops, but `packed`: packets may lie across page boundaries. DPDK puts none there, for devices
 * that address memory physically; with 4 KB pages that is one packet a page, each at the same place in it, where they all
 * compete for the same sets of the cache. */
struct rte_mempool *sluice_pool_create(const char *name, unsigned int packets, unsigned int cache, uint16_t room_bytes,
				       int packed)
{
	struct rte_pktmbuf_pool_private room;
	unsigned int flags = packed ? RTE_MEMPOOL_F_NO_IOVA_CONTIG : 0;
	struct rte_mempool *pool = rte_mempool_create_empty(name, packets, sizeof(struct rte_mbuf) + room_bytes, cache,
							    sizeof(room), SOCKET_ID_ANY, flags);
	int failed;

	if (pool == NULL)
		return NULL;
	memset(&room, 0, sizeof(room));
	room.mbuf_data_room_size = room_bytes;
	failed = rte_mempool_set_ops_byname(pool, "ring_mt_rts", NULL);
	if (failed == 0) {
		rte_pktmbuf_pool_init(pool, &room);
		failed = rte_mempool_populate_default(pool);
	}
	if (failed < 0) {
		rte_mempool_free(pool);
		rte_errno = -failed;
		return NULL;
	}
	rte_mempool_obj_iter(pool, rte_pktmbuf_init, NULL);
	return pool;
}

uint64_t sluice_rdtsc(void)
{
	return rte_rdtsc();
}

uint64_t sluice_tsc_hz(void)
{
	return rte_get_tsc_hz();
}

int sluice_errno(void)
{
	return rte_errno;
}

/* A driver that cannot change its MTU (ENOTSUP) has no limit of its own below the buffer, so it is let through. */
static int set_mtu(uint16_t port, uint16_t mtu_bytes)
{
	uint16_t current = 0;
	int failed = rte_eth_dev_get_mtu(port, &current);

	if (failed == 0 && current == mtu_bytes)
		return 0;
	failed = rte_eth_dev_set_mtu(port, mtu_bytes);
	return failed == -ENOTSUP ? 0 : failed;
}

/* One receive and one transmit queue, no offload of either direction, no RSS. */
int sluice_port_configure(uint16_t port, struct sluice_port_setup *setup)
{
	struct rte_eth_dev_info info;
	struct rte_eth_conf conf;
	unsigned int socket;
	int failed;

	memset(&conf, 0, sizeof(conf));
	setup->step = SLUICE_STEP_INFO;
	failed = rte_eth_dev_info_get(port, &info);
	if (failed != 0)
		return failed;
	socket = rte_eth_dev_socket_id(port);

	setup->step = SLUICE_STEP_MTU;
	if (setup->mtu_bytes < info.min_mtu || setup->mtu_bytes > info.max_mtu)
		return -ERANGE;

	setup->step = SLUICE_STEP_CONFIGURE;
	conf.rxmode.mtu = setup->mtu_bytes;
	failed = rte_eth_dev_configure(port, 1, 1, &conf);
	if (failed != 0)
		return failed;
	failed = rte_eth_dev_adjust_nb_rx_tx_desc(port, &setup->rx_descriptors, &setup->tx_descriptors);
	if (failed != 0)
		return failed;

	setup->step = SLUICE_STEP_RX_QUEUE;
	failed = rte_eth_rx_queue_setup(port, 0, setup->rx_descriptors, socket, NULL, setup->pool);
	if (failed != 0)
		return failed;
	setup->step = SLUICE_STEP_TX_QUEUE;
	failed = rte_eth_tx_queue_setup(port, 0, setup->tx_descriptors, socket, NULL);
	if (failed != 0)
		return failed;

	setup->step = SLUICE_STEP_MTU;
	return set_mtu(port, setup->mtu_bytes);
}

int sluice_port_driver(uint16_t port, char *name, size_t size)
{
	struct rte_eth_dev_info info;
	int failed = rte_eth_dev_info_get(port, &info);

	if (failed != 0)
		return failed;
	snprintf(name, size, "%s", info.driver_name == NULL ? "" : info.driver_name);
	return 0;
}

struct rte_device *sluice_port_device(uint16_t port)
{
	struct rte_eth_dev_info info;

	return rte_eth_dev_info_get(port, &info) == 0 ? (struct rte_device *)(uintptr_t)info.device : NULL;
}

int sluice_port_mac(uint16_t port, uint8_t mac[6])
{
	struct rte_ether_addr address;
	int failed = rte_eth_macaddr_get(port, &address);

	if (failed == 0)
		memcpy(mac, address.addr_bytes, sizeof(address.addr_bytes));
	return failed;
}

int sluice_port_set_mac(uint16_t port, const uint8_t mac[6])
{
	struct rte_ether_addr address;

	memcpy(address.addr_bytes, mac, sizeof(address.addr_bytes));
	return rte_eth_dev_default_mac_addr_set(port, &address);
}

int sluice_port_stats(uint16_t port, struct sluice_port_stats *stats)
{
	struct rte_eth_stats now;
	int failed = rte_eth_stats_get(port, &now);

	if (failed != 0)
		return failed;
	stats->rx_packets = now.ipackets;
	stats->tx_packets = now.opackets;
	stats->rx_missed = now.imissed;
	stats->rx_errors = now.ierrors;
	stats->tx_errors = now.oerrors;
	stats->rx_no_buffer = now.rx_nombuf;
	return 0;
}

int sluice_port_link(uint16_t port, struct sluice_link *link)
{
	struct rte_eth_link now;
	int failed;

	memset(&now, 0, sizeof(now));
	failed = rte_eth_link_get_nowait(port, &now);
	if (failed != 0)
		return failed;
	link->up = now.link_status == RTE_ETH_LINK_UP;
	link->speed_mbps = now.link_speed == RTE_ETH_SPEED_NUM_UNKNOWN ? 0 : now.link_speed;
	return 0;
}

static ssize_t pass_on(void *cookie, const char *text, size_t length)
{
	sluice_log_sink sink = (sluice_log_sink)(uintptr_t)cookie;

	sink((uint32_t)rte_log_cur_msg_loglevel(), text, length);
	return (ssize_t)length;
}

int sluice_log_to(sluice_log_sink sink)
{
	cookie_io_functions_t functions = { .write = pass_on };
	FILE *stream = fopencookie((void *)(uintptr_t)sink, "w", functions);

	return stream == NULL ? -1 : rte_openlog_stream(stream);
}
