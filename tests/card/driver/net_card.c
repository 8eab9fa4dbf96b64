/* net_card: a network card in software, for tests. It receives and sends the frames of a Linux interface, spreads them over
 * its queues by Toeplitz and a redirection table, and takes and refuses what a named driver takes and refuses.
 *
 *   net_card0,iface=eth1,profile=ice,queues=4
 *
 * It fails by command: a datagram to the abstract socket `@net_card0` in the namespace of the interface. `reset`: it moves
 * no frame until it is opened anew, and says so (RTE_ETH_EVENT_INTR_RESET). `remove`: it is gone (RTE_ETH_EVENT_INTR_RMV);
 * it can be opened again while its interface exists. Its link is that of the interface.
 *
 * Where a driver may release transmitted packets without a look at them (RTE_ETH_TX_OFFLOAD_MBUF_FAST_FREE), it ends the
 * process if one of them is not as the application promises.
 *
 * Not here: rte_flow, checksums, VLAN offloads, interrupts of queues. sluice uses none of them. */
#define ALLOW_EXPERIMENTAL_API
#define ALLOW_INTERNAL_API

#include "profile.h"
#include "rss.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <bus_vdev_driver.h>
#include <ethdev_driver.h>
#include <ethdev_vdev.h>
#include <rte_interrupts.h>
#include <rte_kvargs.h>
#include <rte_ring.h>
#include <rte_spinlock.h>

enum { QUEUES_MAX = 16, TABLE_ENTRIES_MAX = 2048, KEY_BYTES_MAX = 52, FRAME_BYTES_MAX = 2048, FRAMES_AT_ONCE = 32 };

struct rx_queue {
	struct card *card;
	struct rte_mempool *pool;
	struct rte_ring *waiting; /* frames that the card has received for this queue */
	uint64_t packets, bytes;
};

struct tx_queue {
	struct card *card;
	struct rte_mempool *pool; /* of the first packet, if packets are released fast */
	bool fast_free;
	uint64_t packets, bytes, errors;
};

struct card {
	const struct profile *profile;
	struct rte_eth_dev_data *data;
	char interface[IFNAMSIZ];
	int frames; /* AF_PACKET */
	int commands; /* AF_UNIX */
	struct rte_intr_handle *interrupt;
	bool is_dead;
	uint16_t queues_max;
	struct rte_ether_addr mac;
	uint64_t hashes; /* RTE_ETH_RSS_ in use */
	bool reports_hash;
	uint8_t key[KEY_BYTES_MAX];
	uint16_t table_entries;
	uint16_t table[TABLE_ENTRIES_MAX];
	rte_spinlock_t receiving;
	uint64_t missed;
	struct rx_queue rx[QUEUES_MAX];
	struct tx_queue tx[QUEUES_MAX];
};

/* Its own key, where it takes none of the application: that of the first verification suite for RSS. */
static const uint8_t own_key[KEY_BYTES_MAX] = {
	0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb,
	0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
};

RTE_LOG_REGISTER_DEFAULT(card_log, NOTICE);
#define CARD_LOG(level, ...) rte_log(RTE_LOG_##level, card_log, "net_card: " __VA_ARGS__)

/* Whether the filter of the card lets a frame in. */
static bool is_for(const struct card *card, const struct rte_ether_addr *to)
{
	if (card->data->promiscuous || rte_is_broadcast_ether_addr(to) || rte_is_same_ether_addr(to, &card->mac))
		return true;
	return card->data->all_multicast && rte_is_multicast_ether_addr(to);
}

/* Puts a frame into the queue that its hash leads to. */
static void distribute(struct card *card, const uint8_t *frame, uint32_t bytes)
{
	uint32_t hash = 0;
	bool is_hashed = card->hashes != 0 && rss_hash(frame, bytes, card->hashes, card->key, &hash);
	struct rx_queue *queue = &card->rx[is_hashed ? card->table[hash % card->table_entries] : 0];
	struct rte_mbuf *packet = rte_pktmbuf_alloc(queue->pool);
	char *room = packet == NULL ? NULL : rte_pktmbuf_append(packet, bytes);

	if (room == NULL || rte_ring_enqueue(queue->waiting, packet) != 0) {
		rte_pktmbuf_free(packet);
		card->missed++;
		return;
	}
	memcpy(room, frame, bytes);
	packet->port = card->data->port_id;
	if (is_hashed && card->reports_hash) {
		packet->hash.rss = hash;
		packet->ol_flags |= RTE_MBUF_F_RX_RSS_HASH;
	}
}

/* Receives for all queues, as a card does. Whichever worker polls first does it for the others. */
static void receive_frames(struct card *card)
{
	uint8_t frame[FRAME_BYTES_MAX];

	for (int i = 0; i < FRAMES_AT_ONCE; i++) {
		ssize_t bytes = recv(card->frames, frame, sizeof(frame), MSG_DONTWAIT);

		if (bytes < (ssize_t)sizeof(struct rte_ether_hdr))
			return;
		if (is_for(card, (const struct rte_ether_addr *)frame))
			distribute(card, frame, (uint32_t)bytes);
	}
}

static uint16_t card_rx(void *rx, struct rte_mbuf **packets, uint16_t count)
{
	struct rx_queue *queue = rx;
	struct card *card = queue->card;
	unsigned int received;

	if (__atomic_load_n(&card->is_dead, __ATOMIC_ACQUIRE))
		return 0;
	if (rte_spinlock_trylock(&card->receiving)) {
		receive_frames(card);
		rte_spinlock_unlock(&card->receiving);
	}
	received = rte_ring_dequeue_burst(queue->waiting, (void **)packets, count, NULL);
	for (unsigned int i = 0; i < received; i++)
		queue->bytes += packets[i]->pkt_len;
	queue->packets += received;
	return (uint16_t)received;
}

/* Releases a packet as drivers do that were promised packets of one pool, in one segment, with one reference. */
static void release_fast(struct tx_queue *queue, struct rte_mbuf *packet)
{
	if (queue->pool == NULL)
		queue->pool = packet->pool;
	if (packet->pool != queue->pool || rte_mbuf_refcnt_read(packet) != 1 || packet->nb_segs != 1 || !RTE_MBUF_DIRECT(packet))
		rte_panic("net_card: a packet breaks the promise of MBUF_FAST_FREE\n");
	rte_mempool_put(packet->pool, packet);
}

static uint16_t card_tx(void *tx, struct rte_mbuf **packets, uint16_t count)
{
	struct tx_queue *queue = tx;
	struct card *card = queue->card;
	uint16_t taken;

	for (taken = 0; taken < count; taken++) {
		struct rte_mbuf *packet = packets[taken];
		ssize_t sent = -1;

		if (!__atomic_load_n(&card->is_dead, __ATOMIC_ACQUIRE))
			sent = send(card->frames, rte_pktmbuf_mtod(packet, void *), packet->data_len, MSG_DONTWAIT);
		if (sent < 0 && (errno == EAGAIN || errno == ENOBUFS) && !card->is_dead)
			break;
		if (sent < 0) {
			queue->errors++;
		} else {
			queue->packets++;
			queue->bytes += (uint64_t)sent;
		}
		if (queue->fast_free)
			release_fast(queue, packet);
		else
			rte_pktmbuf_free(packet);
	}
	return taken;
}

static int card_info(struct rte_eth_dev *dev, struct rte_eth_dev_info *info)
{
	const struct card *card = dev->data->dev_private;
	const struct profile *profile = card->profile;

	info->max_rx_pktlen = FRAME_BYTES_MAX;
	info->max_mtu = FRAME_BYTES_MAX - RTE_ETHER_HDR_LEN - RTE_ETHER_CRC_LEN;
	info->max_rx_queues = card->queues_max;
	info->max_tx_queues = card->queues_max;
	info->max_mac_addrs = 1;
	info->rx_desc_lim = (struct rte_eth_desc_lim){ .nb_max = 4096, .nb_min = 64, .nb_align = 32 };
	info->tx_desc_lim = info->rx_desc_lim;
	info->hash_key_size = profile->key_bytes;
	info->reta_size = card->table_entries;
	info->flow_type_rss_offloads = profile->hashes;
	info->rx_offload_capa = profile->reports_hash ? RTE_ETH_RX_OFFLOAD_RSS_HASH : 0;
	info->tx_offload_capa = profile->fast_free ? RTE_ETH_TX_OFFLOAD_MBUF_FAST_FREE : 0;
	return 0;
}

/* Takes the key and the hashes of a configuration, and spreads packets evenly, as drivers do before a table is set. */
static int card_configure(struct rte_eth_dev *dev)
{
	const struct rte_eth_conf *conf = &dev->data->dev_conf;
	const struct rte_eth_rss_conf *rss = &conf->rx_adv_conf.rss_conf;
	struct card *card = dev->data->dev_private;
	const struct profile *profile = card->profile;

	card->hashes = 0;
	card->reports_hash = (conf->rxmode.offloads & RTE_ETH_RX_OFFLOAD_RSS_HASH) != 0;
	if ((conf->rxmode.mq_mode & RTE_ETH_MQ_RX_RSS_FLAG) == 0)
		return 0;
	memcpy(card->key, own_key, sizeof(own_key));
	if (rss->rss_key != NULL && rss->rss_key_len == profile->key_bytes) {
		memcpy(card->key, rss->rss_key, profile->key_bytes);
	} else if (profile->refuses_other_keys) {
		CARD_LOG(ERR, "the RSS key has %u bytes, and %u are expected\n", rss->rss_key_len, profile->key_bytes);
		return -EINVAL;
	}
	card->hashes = rss->rss_hf;
	if (profile->table_rule == TABLE_OF_ANY_SIZE)
		card->table_entries = (uint16_t)rte_align32pow2(dev->data->nb_rx_queues);
	for (uint16_t i = 0; i < card->table_entries; i++)
		card->table[i] = i % dev->data->nb_rx_queues;
	return 0;
}

static int card_rx_setup(struct rte_eth_dev *dev, uint16_t queue, uint16_t descriptors, unsigned int socket,
			 const struct rte_eth_rxconf *conf, struct rte_mempool *pool)
{
	struct card *card = dev->data->dev_private;
	struct rx_queue *rx = &card->rx[queue];
	char name[RTE_RING_NAMESIZE];

	(void)conf;
	snprintf(name, sizeof(name), "net_card_%u_%u", dev->data->port_id, queue);
	*rx = (struct rx_queue){ .card = card, .pool = pool };
	rx->waiting = rte_ring_create(name, descriptors, (int)socket, RING_F_SP_ENQ | RING_F_SC_DEQ | RING_F_EXACT_SZ);
	dev->data->rx_queues[queue] = rx;
	return rx->waiting == NULL ? -rte_errno : 0;
}

static void card_rx_release(struct rte_eth_dev *dev, uint16_t queue)
{
	struct rx_queue *rx = dev->data->rx_queues[queue];
	void *packet;

	if (rx == NULL)
		return;
	while (rx->waiting != NULL && rte_ring_dequeue(rx->waiting, &packet) == 0)
		rte_pktmbuf_free(packet);
	rte_ring_free(rx->waiting);
	rx->waiting = NULL;
}

static int card_tx_setup(struct rte_eth_dev *dev, uint16_t queue, uint16_t descriptors, unsigned int socket,
			 const struct rte_eth_txconf *conf)
{
	struct card *card = dev->data->dev_private;
	uint64_t offloads = conf->offloads | dev->data->dev_conf.txmode.offloads;

	(void)descriptors;
	(void)socket;
	card->tx[queue] = (struct tx_queue){ .card = card };
	card->tx[queue].fast_free = (offloads & RTE_ETH_TX_OFFLOAD_MBUF_FAST_FREE) != 0;
	dev->data->tx_queues[queue] = &card->tx[queue];
	return 0;
}

static int card_start(struct rte_eth_dev *dev)
{
	dev->rx_pkt_burst = card_rx;
	dev->tx_pkt_burst = card_tx;
	return 0;
}

static int card_stop(struct rte_eth_dev *dev)
{
	dev->data->dev_started = 0;
	return 0;
}

static void run_command(void *argument);

static int card_close(struct rte_eth_dev *dev)
{
	struct card *card = dev->data->dev_private;

	rte_intr_callback_unregister_sync(card->interrupt, run_command, dev);
	rte_intr_instance_free(card->interrupt);
	for (uint16_t queue = 0; queue < dev->data->nb_rx_queues; queue++)
		card_rx_release(dev, queue);
	close(card->commands);
	close(card->frames);
	dev->data->mac_addrs = NULL; /* a part of the card */
	return 0;
}

/* An interface without IFF_RUNNING, and one that is gone, have no link. */
static int card_link(struct rte_eth_dev *dev, int wait)
{
	struct card *card = dev->data->dev_private;
	struct rte_eth_link link = { .link_speed = RTE_ETH_SPEED_NUM_100G, .link_duplex = RTE_ETH_LINK_FULL_DUPLEX };
	struct ifreq request = { 0 };

	(void)wait;
	memcpy(request.ifr_name, card->interface, sizeof(request.ifr_name));
	if (ioctl(card->frames, SIOCGIFFLAGS, &request) == 0 && (request.ifr_flags & IFF_RUNNING) != 0)
		link.link_status = RTE_ETH_LINK_UP;
	return rte_eth_linkstatus_set(dev, &link);
}

static int card_stats(struct rte_eth_dev *dev, struct rte_eth_stats *stats)
{
	const struct card *card = dev->data->dev_private;

	for (uint16_t i = 0; i < dev->data->nb_rx_queues; i++) {
		stats->ipackets += card->rx[i].packets;
		stats->ibytes += card->rx[i].bytes;
	}
	for (uint16_t i = 0; i < dev->data->nb_tx_queues; i++) {
		stats->opackets += card->tx[i].packets;
		stats->obytes += card->tx[i].bytes;
		stats->oerrors += card->tx[i].errors;
	}
	stats->imissed = card->missed;
	return 0;
}

/* The filter reads what ethdev notes. */
static int card_filter(struct rte_eth_dev *dev)
{
	(void)dev;
	return 0;
}

static bool takes_table(const struct card *card, uint16_t entries)
{
	switch (card->profile->table_rule) {
	case TABLE_OF_ANY_SIZE:
		return entries <= TABLE_ENTRIES_MAX;
	case TABLE_OF_SIZES:
		return entries == 128 || entries == 512 || entries == TABLE_ENTRIES_MAX;
	case TABLE_UP_TO_ITS_SIZE:
		return entries <= card->table_entries;
	case TABLE_OF_ITS_SIZE:
		break;
	}
	return entries == card->table_entries;
}

static int card_set_table(struct rte_eth_dev *dev, struct rte_eth_rss_reta_entry64 *groups, uint16_t entries)
{
	struct card *card = dev->data->dev_private;

	if (!takes_table(card, entries)) {
		CARD_LOG(ERR, "the redirection table has %u entries, and %u are expected\n", entries, card->table_entries);
		return -EINVAL;
	}
	if (card->profile->table_rule != TABLE_UP_TO_ITS_SIZE)
		card->table_entries = entries;
	for (uint16_t i = 0; i < entries; i++)
		if (groups[i / RTE_ETH_RETA_GROUP_SIZE].mask & RTE_BIT64(i % RTE_ETH_RETA_GROUP_SIZE))
			card->table[i] = groups[i / RTE_ETH_RETA_GROUP_SIZE].reta[i % RTE_ETH_RETA_GROUP_SIZE];
	return 0;
}

static int card_get_table(struct rte_eth_dev *dev, struct rte_eth_rss_reta_entry64 *groups, uint16_t entries)
{
	const struct card *card = dev->data->dev_private;

	if (entries > card->table_entries)
		return -EINVAL;
	for (uint16_t i = 0; i < entries; i++)
		groups[i / RTE_ETH_RETA_GROUP_SIZE].reta[i % RTE_ETH_RETA_GROUP_SIZE] =
			card->table[i] & (uint16_t)(RTE_BIT32(card->profile->queue_bits) - 1);
	return 0;
}

static int card_get_hash(struct rte_eth_dev *dev, struct rte_eth_rss_conf *rss)
{
	const struct card *card = dev->data->dev_private;

	if (rss->rss_key != NULL && rss->rss_key_len >= card->profile->key_bytes)
		memcpy(rss->rss_key, card->key, card->profile->key_bytes);
	rss->rss_key_len = card->profile->key_bytes;
	rss->rss_hf = card->hashes;
	return 0;
}

static int card_burst_mode(struct rte_eth_dev *dev, uint16_t queue, struct rte_eth_burst_mode *mode)
{
	(void)dev;
	(void)queue;
	snprintf(mode->info, sizeof(mode->info), "Software");
	return 0;
}

static const struct eth_dev_ops card_ops = {
	.dev_infos_get = card_info,
	.dev_configure = card_configure,
	.rx_queue_setup = card_rx_setup,
	.rx_queue_release = card_rx_release,
	.tx_queue_setup = card_tx_setup,
	.dev_start = card_start,
	.dev_stop = card_stop,
	.dev_close = card_close,
	.link_update = card_link,
	.stats_get = card_stats,
	.promiscuous_enable = card_filter,
	.promiscuous_disable = card_filter,
	.allmulticast_enable = card_filter,
	.allmulticast_disable = card_filter,
	.reta_update = card_set_table,
	.reta_query = card_get_table,
	.rss_hash_conf_get = card_get_hash,
	.rx_burst_mode_get = card_burst_mode,
	.tx_burst_mode_get = card_burst_mode,
};

/* Runs a command, on DPDK's interrupt thread, as drivers report what their card did. */
static void run_command(void *argument)
{
	struct rte_eth_dev *dev = argument;
	struct card *card = dev->data->dev_private;
	char command[16] = { 0 };
	bool is_removal;

	if (recv(card->commands, command, sizeof(command) - 1, MSG_DONTWAIT) <= 0)
		return;
	is_removal = strcmp(command, "remove") == 0;
	if (!is_removal && strcmp(command, "reset") != 0) {
		CARD_LOG(ERR, "unknown command '%s': expected reset or remove\n", command);
		return;
	}
	__atomic_store_n(&card->is_dead, true, __ATOMIC_RELEASE);
	rte_eth_dev_callback_process(dev, is_removal ? RTE_ETH_EVENT_INTR_RMV : RTE_ETH_EVENT_INTR_RESET, NULL);
}

static int open_commands(struct rte_eth_dev *dev, struct card *card)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	socklen_t bytes;

	bytes = offsetof(struct sockaddr_un, sun_path) + 1 +
		(socklen_t)snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "%s", dev->data->name);
	card->commands = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (card->commands < 0 || bind(card->commands, (struct sockaddr *)&address, bytes) != 0)
		return -errno;
	card->interrupt = rte_intr_instance_alloc(RTE_INTR_INSTANCE_F_PRIVATE);
	if (card->interrupt == NULL)
		return -ENOMEM;
	rte_intr_fd_set(card->interrupt, card->commands);
	rte_intr_type_set(card->interrupt, RTE_INTR_HANDLE_EXT);
	return rte_intr_callback_register(card->interrupt, run_command, dev);
}

/* The frames of the interface, without those that Linux sends by it. */
static int open_frames(struct card *card)
{
	struct sockaddr_ll address = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL) };
	struct ifreq request = { 0 };
	int on = 1;

	address.sll_ifindex = (int)if_nametoindex(card->interface);
	if (address.sll_ifindex == 0)
		return -ENODEV;
	card->frames = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
	memcpy(request.ifr_name, card->interface, sizeof(request.ifr_name));
	if (card->frames < 0 || setsockopt(card->frames, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof(on)) != 0 ||
	    bind(card->frames, (struct sockaddr *)&address, sizeof(address)) != 0 ||
	    ioctl(card->frames, SIOCGIFHWADDR, &request) != 0)
		return -errno;
	memcpy(card->mac.addr_bytes, request.ifr_hwaddr.sa_data, sizeof(card->mac.addr_bytes));
	return 0;
}

static int set_interface(const char *key, const char *value, void *card)
{
	(void)key;
	snprintf(((struct card *)card)->interface, IFNAMSIZ, "%s", value);
	return 0;
}

static int set_profile(const char *key, const char *value, void *card)
{
	(void)key;
	((struct card *)card)->profile = profile_of(value);
	return 0;
}

static int set_queues(const char *key, const char *value, void *card)
{
	int queues = atoi(value);

	(void)key;
	((struct card *)card)->queues_max = (uint16_t)RTE_MIN(RTE_MAX(queues, 1), QUEUES_MAX);
	return 0;
}

static int read_arguments(struct card *card, const char *text)
{
	static const char *const keys[] = { "iface", "profile", "queues", NULL };
	struct rte_kvargs *arguments = rte_kvargs_parse(text, keys);

	if (arguments == NULL)
		return -EINVAL;
	card->queues_max = QUEUES_MAX;
	rte_kvargs_process(arguments, "iface", set_interface, card);
	rte_kvargs_process(arguments, "profile", set_profile, card);
	rte_kvargs_process(arguments, "queues", set_queues, card);
	rte_kvargs_free(arguments);
	if (card->profile != NULL)
		return 0;
	CARD_LOG(ERR, "no profile of that name in '%s'\n", text);
	return -EINVAL;
}

static int card_probe(struct rte_vdev_device *device)
{
	struct rte_eth_dev *dev = rte_eth_vdev_allocate(device, sizeof(struct card));
	struct card *card;
	int failed;

	if (dev == NULL)
		return -ENOMEM;
	card = dev->data->dev_private;
	card->data = dev->data;
	card->frames = -1;
	card->commands = -1;
	rte_spinlock_init(&card->receiving);
	failed = read_arguments(card, rte_vdev_device_args(device));
	if (failed == 0)
		failed = open_frames(card);
	if (failed == 0)
		failed = open_commands(dev, card);
	if (failed != 0) {
		rte_intr_instance_free(card->interrupt);
		close(card->commands);
		close(card->frames);
		rte_eth_dev_release_port(dev);
		return failed;
	}
	card->table_entries = card->profile->table_entries;
	dev->data->mac_addrs = &card->mac;
	dev->dev_ops = &card_ops;
	rte_eth_dev_probing_finish(dev);
	return 0;
}

static int card_remove(struct rte_vdev_device *device)
{
	struct rte_eth_dev *dev = rte_eth_dev_allocated(rte_vdev_device_name(device));

	return dev == NULL ? 0 : rte_eth_dev_close(dev->data->port_id);
}

static struct rte_vdev_driver card_driver = { .probe = card_probe, .remove = card_remove };

RTE_PMD_REGISTER_VDEV(net_card, card_driver);
