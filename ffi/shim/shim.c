#define _GNU_SOURCE /* fopencookie */
/* rte_dev_event_callback_register and rte_eth_dev_conf_get: marked as experimental in 22.11, unchanged since. */
#define ALLOW_EXPERIMENTAL_API

#include "shim.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <linux/if_packet.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <rte_cycles.h>
#include <rte_epoll.h>
#include <rte_interrupts.h>
#include <rte_log.h>
#include <rte_timer.h>

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

/* Puts a frame in several segments into one: into its first buffer if that has room for the rest, else into a new one
 * of `pool`. If the frame is longer than a buffer or the pool is empty, it becomes an empty frame, which is not taken
 * for a packet. */
static struct rte_mbuf *linearize(struct rte_mempool *pool, struct rte_mbuf *chain)
{
	uint32_t room = rte_pktmbuf_data_room_size(pool) - RTE_PKTMBUF_HEADROOM;
	struct rte_mbuf *whole = NULL;

	if (rte_pktmbuf_linearize(chain) == 0)
		return chain;
	if (rte_pktmbuf_pkt_len(chain) <= room)
		whole = rte_pktmbuf_copy(chain, pool, 0, UINT32_MAX);
	if (whole != NULL) {
		rte_pktmbuf_free(chain);
		return whole;
	}
	rte_pktmbuf_free(chain->next);
	chain->next = NULL;
	chain->nb_segs = 1;
	chain->data_len = 0;
	chain->pkt_len = 0;
	return chain;
}

void sluice_linearize(struct rte_mempool *pool, struct rte_mbuf **packets, uint16_t count)
{
	uint16_t i;

	for (i = 0; i < count; i++)
		if (unlikely(packets[i]->nb_segs > 1))
			packets[i] = linearize(pool, packets[i]);
}

int sluice_append(struct rte_mbuf *packet, struct rte_mbuf *segment)
{
	return rte_pktmbuf_chain(packet, segment);
}

unsigned int sluice_ring_enqueue(struct rte_ring *ring, struct rte_mbuf **packets, unsigned int count)
{
	return rte_ring_enqueue_burst(ring, (void **)packets, count, NULL);
}

unsigned int sluice_ring_dequeue(struct rte_ring *ring, struct rte_mbuf **packets, unsigned int count)
{
	return rte_ring_dequeue_burst(ring, (void **)packets, count, NULL);
}

/* Like rte_pktmbuf_pool_create_by_ops, except for `packed`: packets may cross page boundaries. DPDK avoids that for
 * devices that use physical addresses. With 4 KB pages that means one packet per page, all at the same offset, so that
 * they compete for the same cache sets. */
struct rte_mempool *sluice_pool_create(const char *name, unsigned int packets, unsigned int cache, uint16_t room_bytes,
				       int packed, int socket)
{
	struct rte_pktmbuf_pool_private room;
	unsigned int flags = packed ? RTE_MEMPOOL_F_NO_IOVA_CONTIG : 0;
	struct rte_mempool *pool = rte_mempool_create_empty(name, packets, sizeof(struct rte_mbuf) + room_bytes, cache,
							    sizeof(room), socket, flags);
	int failed;

	/* EAL may have no memory on the node. */
	if (pool == NULL && socket != SOCKET_ID_ANY)
		return sluice_pool_create(name, packets, cache, room_bytes, packed, SOCKET_ID_ANY);
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
		if (socket != SOCKET_ID_ANY)
			return sluice_pool_create(name, packets, cache, room_bytes, packed, SOCKET_ID_ANY);
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

/* A driver that cannot change its MTU (ENOTSUP) has no limit below the buffer size, so that is not an error. */
static int set_mtu(uint16_t port, uint16_t mtu_bytes)
{
	uint16_t current = 0;
	int failed = rte_eth_dev_get_mtu(port, &current);

	if (failed == 0 && current == mtu_bytes)
		return 0;
	failed = rte_eth_dev_set_mtu(port, mtu_bytes);
	return failed == -ENOTSUP ? 0 : failed;
}

/* Packets hashed by receive side scaling, as far as the device offers: those with ports. All others arrive at queue 0. */
#define SPREAD                                                                                                         \
	(RTE_ETH_RSS_NONFRAG_IPV4_TCP | RTE_ETH_RSS_NONFRAG_IPV4_UDP | RTE_ETH_RSS_NONFRAG_IPV6_TCP |                  \
	 RTE_ETH_RSS_NONFRAG_IPV6_UDP)

/* A device may need a longer key. The bytes beyond 40 are zero and unused: IPv6 addresses and ports need 40. */
#define KEY_BYTES_MAX 64

/* The keys by port. ethdev keeps the pointer of a configuration, and drivers (igb, ixgbe) read it when they start, so a
 * key lives as long as the process. */
static uint8_t rss_keys[RTE_MAX_ETHPORTS][KEY_BYTES_MAX];

/* Configures RSS if the device offers it; if the device then refuses it, configures the device without. */
static int configure(uint16_t port, struct sluice_port_setup *setup, const struct rte_eth_dev_info *info,
		     struct rte_eth_conf *conf)
{
	uint64_t spread = info->flow_type_rss_offloads & SPREAD;
	uint8_t *key = rss_keys[port];
	uint8_t key_bytes = info->hash_key_size == 0 ? SLUICE_RSS_KEY_BYTES : info->hash_key_size;
	int possible = setup->rss_key != NULL && setup->rx_queues > 1 && spread != 0 &&
		       key_bytes >= SLUICE_RSS_KEY_BYTES && key_bytes <= KEY_BYTES_MAX;

	setup->spreads = 0;
	if (possible) {
		memset(key, 0, KEY_BYTES_MAX);
		memcpy(key, setup->rss_key, SLUICE_RSS_KEY_BYTES);
		conf->rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
		conf->rxmode.offloads = info->rx_offload_capa & RTE_ETH_RX_OFFLOAD_RSS_HASH;
		conf->rx_adv_conf.rss_conf.rss_key = key;
		conf->rx_adv_conf.rss_conf.rss_key_len = key_bytes;
		conf->rx_adv_conf.rss_conf.rss_hf = spread;
		setup->spreads = rte_eth_dev_configure(port, setup->rx_queues, setup->tx_queues, conf) == 0;
		if (setup->spreads)
			return 0;
		conf->rxmode.mq_mode = RTE_ETH_MQ_RX_NONE;
		conf->rxmode.offloads = 0;
		memset(&conf->rx_adv_conf, 0, sizeof(conf->rx_adv_conf));
	}
	return rte_eth_dev_configure(port, setup->rx_queues, setup->tx_queues, conf);
}

/* MTU limits of the driver. A driver without a largest MTU reports the longest frame, including its checksum. */
static void find_mtus(struct sluice_port_setup *setup, const struct rte_eth_dev_info *info)
{
	const uint32_t overhead = RTE_ETHER_HDR_LEN + RTE_ETHER_CRC_LEN;

	setup->mtu_min = info->min_mtu;
	setup->mtu_max = info->max_mtu;
	if (info->max_mtu == UINT16_MAX && info->max_rx_pktlen > overhead)
		setup->mtu_max = RTE_MIN(setup->mtu_max, info->max_rx_pktlen - overhead);
}

static int watch_events(uint16_t port);

/* Configures interrupts of the receive queues if they are wanted; if the device refuses, configures it without. */
static int configure_with_interrupts(uint16_t port, struct sluice_port_setup *setup, const struct rte_eth_dev_info *info,
				     struct rte_eth_conf *conf)
{
	int failed;

	conf->intr_conf.rxq = setup->interrupts != 0;
	failed = configure(port, setup, info, conf);
	if (failed != 0 && setup->interrupts) {
		conf->intr_conf.rxq = 0;
		failed = configure(port, setup, info, conf);
		if (failed == 0)
			setup->interrupts = 0;
	}
	return failed;
}

/* Configures as many of the wanted queues as the device has, without offloads that change packets. */
int sluice_port_configure(uint16_t port, struct sluice_port_setup *setup)
{
	struct rte_eth_dev_info info;
	struct rte_eth_conf conf;
	unsigned int socket;
	uint16_t queue;
	int failed;

	memset(&conf, 0, sizeof(conf));
	setup->step = SLUICE_STEP_INFO;
	failed = rte_eth_dev_info_get(port, &info);
	if (failed == 0)
		failed = watch_events(port);
	if (failed != 0)
		return failed;
	socket = rte_eth_dev_socket_id(port);
	find_mtus(setup, &info);

	setup->step = SLUICE_STEP_MTU;
	if (setup->mtu_bytes < info.min_mtu || setup->mtu_bytes > info.max_mtu)
		return -ERANGE;

	setup->step = SLUICE_STEP_CONFIGURE;
	conf.rxmode.mtu = setup->mtu_bytes;
	if (setup->fast_free)
		conf.txmode.offloads = info.tx_offload_capa & RTE_ETH_TX_OFFLOAD_MBUF_FAST_FREE;
	setup->rx_queues = RTE_MIN(setup->rx_queues, info.max_rx_queues);
	setup->tx_queues = RTE_MIN(setup->tx_queues, info.max_tx_queues);
	failed = configure_with_interrupts(port, setup, &info, &conf);
	/* vmxnet3 takes a power of two alone. */
	if (failed != 0 && !rte_is_power_of_2(setup->rx_queues)) {
		setup->rx_queues = (uint16_t)rte_align32prevpow2(setup->rx_queues);
		failed = configure_with_interrupts(port, setup, &info, &conf);
	}
	if (failed != 0)
		return failed;
	failed = rte_eth_dev_adjust_nb_rx_tx_desc(port, &setup->rx_descriptors, &setup->tx_descriptors);
	if (failed != 0)
		return failed;

	setup->step = SLUICE_STEP_RX_QUEUE;
	for (queue = 0; queue < setup->rx_queues; queue++) {
		failed = rte_eth_rx_queue_setup(port, queue, setup->rx_descriptors, socket, NULL, setup->pool);
		if (failed != 0)
			return failed;
	}
	setup->step = SLUICE_STEP_TX_QUEUE;
	for (queue = 0; queue < setup->tx_queues; queue++) {
		failed = rte_eth_tx_queue_setup(port, queue, setup->tx_descriptors, socket, NULL);
		if (failed != 0)
			return failed;
	}

	setup->step = SLUICE_STEP_MTU;
	return set_mtu(port, setup->mtu_bytes);
}

/* The offloads in use of a configured port in a SLUICE_ direction: RTE_ETH_RX_OFFLOAD_ or RTE_ETH_TX_OFFLOAD_. Drivers
 * may add some to those that were requested. */
uint64_t sluice_port_offloads(uint16_t port, int direction)
{
	struct rte_eth_conf conf;

	memset(&conf, 0, sizeof(conf));
	if (rte_eth_dev_conf_get(port, &conf) != 0)
		return 0;
	return direction == SLUICE_RECEIVE ? conf.rxmode.offloads : conf.txmode.offloads;
}

/* DPDK's name of one offload. */
const char *sluice_offload_name(uint64_t offload, int direction)
{
	return direction == SLUICE_RECEIVE ? rte_eth_dev_rx_offload_name(offload) : rte_eth_dev_tx_offload_name(offload);
}

/* What a driver says of the function by which it moves packets of queue 0, terminated. */
int sluice_port_burst_mode(uint16_t port, int direction, char *text, size_t size)
{
	struct rte_eth_burst_mode mode;
	int failed;

	memset(&mode, 0, sizeof(mode));
	failed = direction == SLUICE_RECEIVE ? rte_eth_rx_burst_mode_get(port, 0, &mode) :
					       rte_eth_tx_burst_mode_get(port, 0, &mode);
	if (failed == 0)
		snprintf(text, size, "%s", mode.info);
	return failed;
}

uint16_t sluice_port_table_entries(uint16_t port)
{
	struct rte_eth_dev_info info;

	return rte_eth_dev_info_get(port, &info) == 0 ? info.reta_size : 0;
}

/* Sets the redirection table of a started device to `entries` entries (at most 512), the 128 queues repeated or, in a
 * smaller table, the first of them, and reads back whether the device uses this table, this key and these hashes. Returns
 * 0, the error of the driver, or 1 if the device reports something else than was set; `part` is then the SLUICE_SPREAD
 * that was refused. */
int sluice_port_spread(uint16_t port, const uint8_t *key, const uint16_t *queues, uint16_t entries, int *part)
{
	struct rte_eth_rss_reta_entry64 wanted[RTE_ETH_RSS_RETA_SIZE_512 / RTE_ETH_RETA_GROUP_SIZE];
	struct rte_eth_rss_reta_entry64 found[RTE_ETH_RSS_RETA_SIZE_512 / RTE_ETH_RETA_GROUP_SIZE];
	uint8_t found_key[KEY_BYTES_MAX] = { 0 };
	struct rte_eth_rss_conf conf = { .rss_key = found_key, .rss_key_len = KEY_BYTES_MAX };
	uint16_t entry;
	int failed;

	*part = SLUICE_SPREAD_TABLE;
	if (entries == 0 || entries > RTE_ETH_RSS_RETA_SIZE_512)
		return -EINVAL;
	memset(wanted, 0, sizeof(wanted));
	memset(found, 0, sizeof(found));
	for (entry = 0; entry < entries; entry++) {
		uint16_t group = entry / RTE_ETH_RETA_GROUP_SIZE, slot = entry % RTE_ETH_RETA_GROUP_SIZE;

		wanted[group].mask |= UINT64_C(1) << slot;
		wanted[group].reta[slot] = queues[entry % SLUICE_RETA_ENTRIES];
		found[group].mask = wanted[group].mask;
	}
	failed = rte_eth_dev_rss_reta_update(port, wanted, entries);
	if (failed != 0)
		return failed;
	failed = rte_eth_dev_rss_reta_query(port, found, entries);
	if (failed != 0)
		return failed;
	for (entry = 0; entry < entries; entry++) {
		uint16_t group = entry / RTE_ETH_RETA_GROUP_SIZE, slot = entry % RTE_ETH_RETA_GROUP_SIZE;

		if (found[group].reta[slot] != wanted[group].reta[slot])
			return 1;
	}
	*part = SLUICE_SPREAD_KEY;
	failed = rte_eth_dev_rss_hash_conf_get(port, &conf);
	if (failed != 0)
		return failed;
	if (memcmp(found_key, key, SLUICE_RSS_KEY_BYTES) != 0)
		return 1;
	*part = SLUICE_SPREAD_HASHES;
	return (conf.rss_hf & SPREAD) != 0 ? 0 : 1;
}

/* The packets that a started device says it hashes by RSS with their ports: a set of SLUICE_HASHES_. */
uint32_t sluice_port_hashes(uint16_t port)
{
	uint8_t key[KEY_BYTES_MAX];
	struct rte_eth_rss_conf conf = { .rss_key = key, .rss_key_len = KEY_BYTES_MAX };

	if (rte_eth_dev_rss_hash_conf_get(port, &conf) != 0)
		return 0;
	return (conf.rss_hf & RTE_ETH_RSS_NONFRAG_IPV4_TCP ? SLUICE_HASHES_TCP_V4 : 0) |
	       (conf.rss_hf & RTE_ETH_RSS_NONFRAG_IPV4_UDP ? SLUICE_HASHES_UDP_V4 : 0) |
	       (conf.rss_hf & RTE_ETH_RSS_NONFRAG_IPV6_TCP ? SLUICE_HASHES_TCP_V6 : 0) |
	       (conf.rss_hf & RTE_ETH_RSS_NONFRAG_IPV6_UDP ? SLUICE_HASHES_UDP_V6 : 0);
}

/* Whether frames of a started port may arrive in several segments, although scattering is not requested. Assumed of
 * drivers that do not report it. */
int sluice_port_may_chain(uint16_t port, uint16_t queue)
{
	struct rte_eth_rxq_info info;

	return rte_eth_rx_queue_info_get(port, queue, &info) != 0 || info.scattered_rx != 0;
}

/* A duplicate of the socket of a receive queue of net_af_packet, which poll(2) reports as readable while frames wait in
 * its ring; -1 if it is not found. The socket is the first field of the driver's queue (since its first release), which
 * is private: the descriptor found there must be an AF_PACKET socket bound to the port's interface. */
int sluice_af_packet_socket(uint16_t port, uint16_t queue)
{
	const int *rx = rte_eth_fp_ops[port].rxq.data[queue];
	struct rte_eth_dev_info info;
	struct sockaddr_ll bound = { 0 };
	socklen_t bound_bytes = sizeof(bound), domain_bytes = sizeof(int);
	int domain = 0, fd;

	if (rx == NULL || rte_eth_dev_info_get(port, &info) != 0)
		return -1;
	fd = fcntl(*rx, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &domain_bytes) == 0 && domain == AF_PACKET &&
	    getsockname(fd, (struct sockaddr *)&bound, &bound_bytes) == 0 && bound.sll_ifindex == (int)info.if_index)
		return fd;
	close(fd);
	return -1;
}

/* Takes the place of libc's function for the whole process: symbols of the program precede those of shared libraries,
 * also for drivers that EAL loads. The driver net_af_packet joins the socket of each queue to a fanout group whose flag
 * PACKET_FANOUT_FLAG_DEFRAG lets the kernel reassemble IPv4 fragments; the datagram does not fit a frame of the ring and
 * arrives truncated. The driver has no argument for the flag, and a socket joins a group once. So the flag is cleared
 * here; every other call reaches the kernel as it is. The kernel gives all fragments between two addresses to one queue. */
int setsockopt(int fd, int level, int name, const void *value, socklen_t length)
{
	uint32_t fanout;

	if (level == SOL_PACKET && name == PACKET_FANOUT && length == sizeof(fanout)) {
		memcpy(&fanout, value, sizeof(fanout));
		fanout &= ~((uint32_t)PACKET_FANOUT_FLAG_DEFRAG << 16); /* type and flags are the upper half */
		return (int)syscall(SYS_setsockopt, fd, level, name, &fanout, length);
	}
	return (int)syscall(SYS_setsockopt, fd, level, name, value, length);
}

/* Whether the kernel reassembles fragments for a receive queue of net_af_packet. */
int sluice_af_packet_reassembles(uint16_t port, uint16_t queue)
{
	uint32_t fanout = 0; /* identifier (16 bits), type and flags / 256 (8 bits each); 0: no group */
	socklen_t length = sizeof(fanout);
	int fd = sluice_af_packet_socket(port, queue);

	if (fd < 0)
		return 0;
	getsockopt(fd, SOL_PACKET, PACKET_FANOUT, &fanout, &length);
	close(fd);
	return (fanout >> 16 & PACKET_FANOUT_FLAG_DEFRAG) != 0;
}

/* Frames lost since the last call because the ring of a receive queue of net_af_packet was full. The driver does not
 * report them in DPDK 22.11. A later one that asks the kernel itself takes each of them from us or leaves it to us. */
uint64_t sluice_af_packet_missed(uint16_t port, uint16_t queues)
{
	uint64_t missed = 0;

	for (uint16_t queue = 0; queue < queues; queue++) {
		struct tpacket_stats stats = { 0 };
		socklen_t bytes = sizeof(stats);
		int fd = sluice_af_packet_socket(port, queue);

		if (fd < 0)
			continue;
		if (getsockopt(fd, SOL_PACKET, PACKET_STATISTICS, &stats, &bytes) == 0)
			missed += stats.tp_drops;
		close(fd);
	}
	return missed;
}

/* An epoll instance that becomes readable when the receive queue interrupts; -1 if it cannot. */
int sluice_rx_interrupt(uint16_t port, uint16_t queue)
{
	int epoll = epoll_create1(EPOLL_CLOEXEC);

	if (epoll >= 0 && rte_eth_dev_rx_intr_ctl_q(port, queue, epoll, RTE_INTR_EVENT_ADD, NULL) == 0)
		return epoll;
	if (epoll >= 0)
		close(epoll);
	return -1;
}

/* A driver whose interrupts are always on (net_tap) has no functions to switch them. */
void sluice_rx_interrupt_arm(uint16_t port, uint16_t queue, int epoll, int armed)
{
	struct rte_epoll_event event;

	if (armed) {
		rte_eth_dev_rx_intr_enable(port, queue);
		return;
	}
	rte_eth_dev_rx_intr_disable(port, queue);
	/* Reads the counter of an interrupt that came, without waiting. */
	rte_epoll_wait(epoll, &event, 1, 0);
}

void sluice_rx_interrupt_remove(uint16_t port, uint16_t queue, int epoll)
{
	rte_eth_dev_rx_intr_disable(port, queue);
	rte_eth_dev_rx_intr_ctl_q(port, queue, epoll, RTE_INTR_EVENT_DEL, NULL);
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

/* The first port of the device that `name` describes; -1 if it has none. A driver may give its port another name than
 * that of the device (mlx5: a bond of its own ports). */
int sluice_port_of_device(const char *name)
{
	struct rte_dev_iterator iterator;
	uint16_t port;

	if (rte_eth_iterator_init(&iterator, name) != 0)
		return -1;
	port = rte_eth_iterator_next(&iterator);
	if (port >= RTE_MAX_ETHPORTS)
		return -1;
	rte_eth_iterator_cleanup(&iterator);
	return port;
}

/* What drivers have reported by port, a SLUICE_EVENT; written by DPDK's interrupt thread. */
static uint8_t events[RTE_MAX_ETHPORTS];

static int note_event(uint16_t port, enum rte_eth_event_type type, void *argument, void *result)
{
	uint8_t event = type == RTE_ETH_EVENT_INTR_RMV ? SLUICE_EVENT_REMOVED : SLUICE_EVENT_RESET;

	(void)argument;
	(void)result;
	if (port < RTE_MAX_ETHPORTS)
		__atomic_store_n(&events[port], event, __ATOMIC_RELEASE);
	return 0;
}

/* Registers for what a driver reports about this port, and forgets what it reported about an earlier one. A port whose
 * driver could not recover it is to be closed, too. */
static int watch_events(uint16_t port)
{
	static const enum rte_eth_event_type types[] = { RTE_ETH_EVENT_INTR_RESET, RTE_ETH_EVENT_INTR_RMV,
							 RTE_ETH_EVENT_RECOVERY_FAILED };
	int failed = 0;

	for (size_t i = 0; i < RTE_DIM(types) && failed == 0; i++)
		failed = rte_eth_dev_callback_register(port, types[i], note_event, NULL);
	__atomic_store_n(&events[port], 0, __ATOMIC_RELEASE);
	return failed;
}

int sluice_port_event(uint16_t port)
{
	return port < RTE_MAX_ETHPORTS ? __atomic_load_n(&events[port], __ATOMIC_ACQUIRE) : 0;
}

static void note_request(const char *device, enum rte_dev_event_type type, void *sink)
{
	if (device != NULL && type == RTE_DEV_EVENT_REMOVE)
		((sluice_request_sink)(uintptr_t)sink)(device);
}

/* Has DPDK's interrupt thread name to `sink` each device that the kernel asks this process to release. Only VFIO asks:
 * by an interrupt that the driver of the PCI bus listens to. DPDK's monitor of uevents is not needed for it. */
int sluice_watch_requests(sluice_request_sink sink)
{
	return rte_dev_event_callback_register(NULL, note_request, (void *)(uintptr_t)sink);
}

static void run_timer(struct rte_timer *timer)
{
	timer->f(timer, timer->arg);
}

int sluice_timers_start(void)
{
	int failed = rte_timer_subsystem_init();

	return failed == -EALREADY ? 0 : failed;
}

/* Runs the timers that are due, of every lcore: a driver starts its timers on the lcore that starts the port, or on any
 * if that thread has none. */
void sluice_timers_run(void)
{
	unsigned int lcores[RTE_MAX_LCORE];
	int count = 0;

	if (rte_lcore_id() == LCORE_ID_ANY)
		return;
	for (unsigned int lcore = 0; lcore < RTE_MAX_LCORE; lcore++)
		if (rte_eal_lcore_role(lcore) == ROLE_RTE || rte_eal_lcore_role(lcore) == ROLE_NON_EAL)
			lcores[count++] = lcore;
	rte_timer_alt_manage(0, lcores, count, run_timer);
}

/* The NUMA node of a pool's first memory; negative: it has none. */
int sluice_pool_node(struct rte_mempool *pool)
{
	return pool->mz == NULL ? -1 : pool->mz->socket_id;
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

/* Has the port receive frames to one more Ethernet address beside its own. */
int sluice_port_add_mac(uint16_t port, const uint8_t mac[6])
{
	struct rte_ether_addr address, own;
	int failed = rte_eth_macaddr_get(port, &own);

	memcpy(address.addr_bytes, mac, sizeof(address.addr_bytes));
	if (failed != 0 || rte_is_same_ether_addr(&own, &address))
		return failed;
	return rte_eth_dev_mac_addr_add(port, &address, 0);
}

int sluice_port_stats(uint16_t port, struct sluice_port_stats *stats)
{
	struct rte_eth_stats now;
	int failed = rte_eth_stats_get(port, &now);

	if (failed != 0)
		return failed;
	stats->rx_packets = now.ipackets;
	stats->tx_packets = now.opackets;
	stats->rx_bytes = now.ibytes;
	stats->tx_bytes = now.obytes;
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

/* For a device that claims to interrupt on link changes but does not notify anyone (net_tap in 22.11): clears the claim
 * in its device flags. A bond of which it becomes a member then polls its link. */
int sluice_port_disclaim_link_interrupt(uint16_t port)
{
	struct rte_eth_dev_info info;
	int failed = rte_eth_dev_info_get(port, &info);

	if (failed == 0)
		*(uint32_t *)(uintptr_t)info.dev_flags &= ~(uint32_t)RTE_ETH_DEV_INTR_LSC;
	return failed;
}

/* The member that sends and, except in 802.3ad, receives; negative: the port is not a bond. */
int sluice_bond_active_member(uint16_t port)
{
	return rte_eth_bond_primary_get(port);
}

/* Takes a member out of a bond, and gives it its own Ethernet address back. No queue of the bond may be in use. */
int sluice_bond_remove_member(uint16_t port, uint16_t member)
{
	return rte_eth_bond_slave_remove(port, member);
}

/* Adds an attached port to a bond, which configures and starts it like its other members. No queue of the bond may be in
 * use. */
int sluice_bond_add_member(uint16_t port, uint16_t member)
{
	return rte_eth_bond_slave_add(port, member);
}

int sluice_bond_set_mac(uint16_t port, const uint8_t mac[6])
{
	struct rte_ether_addr address;

	memcpy(address.addr_bytes, mac, sizeof(address.addr_bytes));
	return rte_eth_bond_mac_address_set(port, &address);
}

static ssize_t forward(void *cookie, const char *text, size_t length)
{
	sluice_log_sink sink = (sluice_log_sink)(uintptr_t)cookie;

	sink((uint32_t)rte_log_cur_msg_loglevel(), text, length);
	return (ssize_t)length;
}

int sluice_log_to(sluice_log_sink sink)
{
	cookie_io_functions_t functions = { .write = forward };
	FILE *stream = fopencookie((void *)(uintptr_t)sink, "w", functions);

	return stream == NULL ? -1 : rte_openlog_stream(stream);
}
