#include "rss.h"

#include <netinet/in.h>
#include <string.h>

#include <rte_byteorder.h>
#include <rte_ethdev.h>
#include <rte_ether.h>
#include <rte_ip.h>
#include <rte_thash.h>

/* 32-bit words of two IPv6 addresses and two ports. */
#define WORDS_MAX 9

/* Reads big-endian words. */
static void words_of(uint32_t *words, const uint8_t *from, unsigned int count)
{
	for (unsigned int i = 0; i < count; i++) {
		uint32_t word;

		memcpy(&word, from + 4 * i, sizeof(word));
		words[i] = rte_be_to_cpu_32(word);
	}
}

bool rss_hash(const uint8_t *frame, uint32_t bytes, uint64_t kinds, const uint8_t *key, uint32_t *hash)
{
	uint32_t words[WORDS_MAX], at = sizeof(struct rte_ether_hdr);
	unsigned int address_words;
	uint8_t protocol;
	uint64_t kind;

	if (bytes >= at + sizeof(struct rte_vlan_hdr) && frame[12] == 0x81 && frame[13] == 0x00)
		at += sizeof(struct rte_vlan_hdr);
	if (bytes >= at + sizeof(struct rte_ipv4_hdr) && frame[at - 2] == 0x08 && frame[at - 1] == 0x00) {
		if (frame[at] != 0x45 || (frame[at + 6] & 0x3f) != 0 || frame[at + 7] != 0)
			return false;
		protocol = frame[at + 9];
		kind = protocol == IPPROTO_TCP ? RTE_ETH_RSS_NONFRAG_IPV4_TCP :
		       protocol == IPPROTO_UDP ? RTE_ETH_RSS_NONFRAG_IPV4_UDP : 0;
		address_words = 2;
		words_of(words, frame + at + 12, address_words);
		at += sizeof(struct rte_ipv4_hdr);
	} else if (bytes >= at + sizeof(struct rte_ipv6_hdr) && frame[at - 2] == 0x86 && frame[at - 1] == 0xdd) {
		protocol = frame[at + 6];
		kind = protocol == IPPROTO_TCP ? RTE_ETH_RSS_NONFRAG_IPV6_TCP :
		       protocol == IPPROTO_UDP ? RTE_ETH_RSS_NONFRAG_IPV6_UDP : 0;
		address_words = 8;
		words_of(words, frame + at + 8, address_words);
		at += sizeof(struct rte_ipv6_hdr);
	} else {
		return false;
	}
	if ((kinds & kind) == 0 || bytes < at + 4)
		return false;
	words_of(words + address_words, frame + at, 1);
	*hash = rte_softrss(words, address_words + 1, key);
	return true;
}
