/* How drivers of DPDK 22.11 differ in receive side scaling and in what they offer. */
#ifndef NET_CARD_PROFILE_H
#define NET_CARD_PROFILE_H

#include <stdbool.h>
#include <stdint.h>

/* The sizes of a redirection table that a driver takes. */
enum table_rule {
	TABLE_OF_ITS_SIZE, /* the size that it reports, and no other */
	TABLE_OF_ANY_SIZE, /* reports as many entries as queues, then the last size that was set */
	TABLE_OF_SIZES, /* 128, 512 and 2,048; the table then has the new size */
	TABLE_UP_TO_ITS_SIZE, /* sets a part of its table if there are fewer entries */
};

struct profile {
	const char *name;
	enum table_rule table_rule;
	uint16_t table_entries; /* that it reports */
	uint8_t key_bytes;
	bool refuses_other_keys; /* keys of another length; else it uses a key of its own instead */
	uint64_t hashes; /* RTE_ETH_RSS_ that it offers */
	bool reports_hash; /* in the mbuf */
	bool fast_free; /* offers RTE_ETH_TX_OFFLOAD_MBUF_FAST_FREE */
	uint8_t queue_bits; /* of a queue that it reads back from its table */
};

/* The profile of a name; NULL: there is none. */
const struct profile *profile_of(const char *name);

#endif
