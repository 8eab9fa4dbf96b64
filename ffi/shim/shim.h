/* Functions for Rust that DPDK has only as static inline functions or macros, and access to structs whose fields move
 * between DPDK releases. Packets are passed in bursts: the forwarding path calls no function once per packet. */
#ifndef SLUICE_SHIM_H
#define SLUICE_SHIM_H

#include <stddef.h>
#include <stdint.h>

#include <rte_config.h>
#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_eth_bond.h>
#include <rte_eth_ring.h>
#include <rte_ethdev.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>
#include <rte_ring.h>
#include <rte_version.h>

/* Offsets in this DPDK of the mbuf fields that Rust reads directly. bindgen turns them into constants, and mbuf.rs
 * compares its view with them at compile time: the build fails if a DPDK release moves a field. */
enum {
	SLUICE_MBUF_BUF_ADDR = offsetof(struct rte_mbuf, buf_addr),
	SLUICE_MBUF_DATA_OFF = offsetof(struct rte_mbuf, data_off),
	SLUICE_MBUF_NB_SEGS = offsetof(struct rte_mbuf, nb_segs),
	SLUICE_MBUF_OL_FLAGS = offsetof(struct rte_mbuf, ol_flags),
	SLUICE_MBUF_RSS_HASH = offsetof(struct rte_mbuf, hash.rss),
	SLUICE_MBUF_HAS_RSS_HASH = RTE_MBUF_F_RX_RSS_HASH,
	SLUICE_MBUF_PKT_LEN = offsetof(struct rte_mbuf, pkt_len),
	SLUICE_MBUF_DATA_LEN = offsetof(struct rte_mbuf, data_len),
	SLUICE_MBUF_BUF_LEN = offsetof(struct rte_mbuf, buf_len),
	SLUICE_MBUF_ALIGN = _Alignof(struct rte_mbuf),
	SLUICE_MBUF_SIZE = sizeof(struct rte_mbuf),
	SLUICE_HEADROOM = RTE_PKTMBUF_HEADROOM,
};

/* The steps of setting up a port, in order; the error message names the one that failed. */
enum { SLUICE_STEP_INFO, SLUICE_STEP_MTU, SLUICE_STEP_CONFIGURE, SLUICE_STEP_RX_QUEUE, SLUICE_STEP_TX_QUEUE };

struct sluice_port_setup {
	struct rte_mempool *pool;
	uint16_t mtu_bytes;
	uint16_t rx_descriptors; /* in: wanted; out: as adjusted by the driver */
	uint16_t tx_descriptors;
	uint16_t rx_queues; /* in: wanted; out: as many as the device has */
	uint16_t tx_queues;
	const uint8_t *rss_key; /* SLUICE_RSS_KEY_BYTES; NULL: no receive side scaling */
	int spreads; /* whether the device accepted the key */
	int interrupts; /* in: receive queues shall interrupt; out: whether the device accepted that */
	int fast_free; /* packets sent are of one pool, in one segment, with one reference */
	uint32_t mtu_min, mtu_max; /* limits of the driver, bytes */
	int step; /* the step that failed */
};

/* What a driver reports about a port that has to be opened anew; 0: nothing. */
enum { SLUICE_EVENT_RESET = 1, SLUICE_EVENT_REMOVED };

/* The parts of receive side scaling that a device may refuse. */
enum { SLUICE_SPREAD_TABLE, SLUICE_SPREAD_KEY, SLUICE_SPREAD_HASHES };

enum { SLUICE_RSS_KEY_BYTES = 40, SLUICE_RETA_ENTRIES = 128 };

/* The directions of a port. */
enum { SLUICE_RECEIVE, SLUICE_TRANSMIT };

/* Kinds of packets that a device may hash by RSS. */
enum {
	SLUICE_HASHES_TCP_V4 = 1,
	SLUICE_HASHES_UDP_V4 = 2,
	SLUICE_HASHES_TCP_V6 = 4,
	SLUICE_HASHES_UDP_V6 = 8,
};

struct sluice_port_stats {
	uint64_t rx_packets, tx_packets, rx_bytes, tx_bytes, rx_missed, rx_errors, tx_errors, rx_no_buffer;
};

struct sluice_link {
	uint32_t speed_mbps; /* 0: unknown */
	int up;
};

typedef void (*sluice_log_sink)(uint32_t level, const char *text, size_t length);
typedef void (*sluice_request_sink)(const char *device);

uint16_t sluice_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **packets, uint16_t count);
uint16_t sluice_tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **packets, uint16_t count);
int sluice_alloc_bulk(struct rte_mempool *pool, struct rte_mbuf **packets, unsigned int count);
void sluice_linearize(struct rte_mempool *pool, struct rte_mbuf **packets, uint16_t count);
int sluice_append(struct rte_mbuf *packet, struct rte_mbuf *segment);
unsigned int sluice_ring_enqueue(struct rte_ring *ring, struct rte_mbuf **packets, unsigned int count);
unsigned int sluice_ring_dequeue(struct rte_ring *ring, struct rte_mbuf **packets, unsigned int count);

struct rte_mempool *sluice_pool_create(const char *name, unsigned int packets, unsigned int cache, uint16_t room_bytes,
				       int packed, int socket);
int sluice_pool_node(struct rte_mempool *pool);

uint64_t sluice_rdtsc(void);
uint64_t sluice_tsc_hz(void);
int sluice_errno(void);

int sluice_port_configure(uint16_t port, struct sluice_port_setup *setup);
uint64_t sluice_port_offloads(uint16_t port, int direction);
const char *sluice_offload_name(uint64_t offload, int direction);
int sluice_port_burst_mode(uint16_t port, int direction, char *text, size_t size);
uint16_t sluice_port_table_entries(uint16_t port);
int sluice_port_spread(uint16_t port, const uint8_t *key, const uint16_t *queues, uint16_t entries, int *part);
uint32_t sluice_port_hashes(uint16_t port);
int sluice_port_event(uint16_t port);
int sluice_watch_requests(sluice_request_sink sink);
int sluice_port_of_device(const char *name);
int sluice_timers_start(void);
void sluice_timers_run(void);
int sluice_port_may_chain(uint16_t port, uint16_t queue);
int sluice_af_packet_socket(uint16_t port, uint16_t queue);
int sluice_af_packet_reassembles(uint16_t port, uint16_t queue);
uint64_t sluice_af_packet_missed(uint16_t port, uint16_t queues);
int sluice_rx_interrupt(uint16_t port, uint16_t queue);
void sluice_rx_interrupt_arm(uint16_t port, uint16_t queue, int epoll, int armed);
void sluice_rx_interrupt_remove(uint16_t port, uint16_t queue, int epoll);
int sluice_port_driver(uint16_t port, char *name, size_t size);
struct rte_device *sluice_port_device(uint16_t port);
int sluice_port_mac(uint16_t port, uint8_t mac[6]);
int sluice_port_set_mac(uint16_t port, const uint8_t mac[6]);
int sluice_port_add_mac(uint16_t port, const uint8_t mac[6]);
int sluice_port_stats(uint16_t port, struct sluice_port_stats *stats);
int sluice_port_link(uint16_t port, struct sluice_link *link);
int sluice_port_disclaim_link_interrupt(uint16_t port);
int sluice_bond_remove_member(uint16_t port, uint16_t member);
int sluice_bond_add_member(uint16_t port, uint16_t member);
int sluice_bond_set_mac(uint16_t port, const uint8_t mac[6]);
int sluice_bond_active_member(uint16_t port);

int sluice_log_to(sluice_log_sink sink);

#endif
