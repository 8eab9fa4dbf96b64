/* The Toeplitz hash of a frame, as network cards compute it. */
#ifndef NET_CARD_RSS_H
#define NET_CARD_RSS_H

#include <stdbool.h>
#include <stdint.h>

/* Hashes a frame whose kind is in `kinds` (RTE_ETH_RSS_NONFRAG_). False: it is of another kind. A tag of 802.1Q is passed
 * over. Frames with options, extension headers, or of fragments are of no kind. */
bool rss_hash(const uint8_t *frame, uint32_t bytes, uint64_t kinds, const uint8_t *key, uint32_t *hash);

#endif
