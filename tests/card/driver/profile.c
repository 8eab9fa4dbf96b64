/* Each row is read in the driver of DPDK 22.11 that it is named after. Files are relative to drivers/net there. */
#include "profile.h"

#include <string.h>

#include <rte_common.h>
#include <rte_ethdev.h>

#define WITH_PORTS                                                                                                     \
	(RTE_ETH_RSS_NONFRAG_IPV4_TCP | RTE_ETH_RSS_NONFRAG_IPV4_UDP | RTE_ETH_RSS_NONFRAG_IPV6_TCP |                  \
	 RTE_ETH_RSS_NONFRAG_IPV6_UDP)
#define ADDRESSES (RTE_ETH_RSS_IPV4 | RTE_ETH_RSS_IPV6)

static const struct profile profiles[] = {
	/* mlx5/mlx5_rss.c: mlx5_dev_rss_reta_update resizes the table. mlx5/mlx5_ethdev.c: mlx5_dev_infos_get reports its
	 * size; mlx5_dev_configure_rss_reta makes as many entries as queues, where these are a power of two;
	 * mlx5_dev_configure refuses other keys. mlx5/mlx5_txq.c: mlx5_get_tx_port_offloads. */
	{ "mlx5", TABLE_OF_ANY_SIZE, 0, 40, true, ADDRESSES | WITH_PORTS, true, true, 16 },
	/* ice/ice_ethdev.c: ice_rss_reta_update, ice_rss_reta_query, ice_init_rss, ice_dev_info_get. */
	{ "ice", TABLE_OF_SIZES, 512, 52, false, ADDRESSES | WITH_PORTS | RTE_ETH_RSS_L2_PAYLOAD, true, true, 8 },
	/* i40e/i40e_ethdev.c: i40e_dev_rss_reta_update; i40e_pf_reset_rss_key takes a default key for a shorter one. */
	{ "i40e", TABLE_OF_ITS_SIZE, 512, 52, false, WITH_PORTS | RTE_ETH_RSS_L2_PAYLOAD, true, true, 8 },
	/* nfp/nfp_common.c: nfp_net_rss_reta_write, nfp_net_infos_get; nfp_net_reta_query keeps four bits of a queue. */
	{ "nfp", TABLE_OF_ITS_SIZE, 128, 40, false, ADDRESSES | WITH_PORTS, true, false, 4 },
	/* bnxt/bnxt_ethdev.c: bnxt_reta_update_op; bnxt_dev_configure_op warns of another key and ignores it. */
	{ "bnxt", TABLE_OF_ITS_SIZE, 128, 40, false, ADDRESSES | WITH_PORTS, true, true, 16 },
	/* The same on the chip P5 (BCM575xx): bnxt_rss_hash_tbl_size is 64 for up to 64 queues. */
	{ "bnxt-p5", TABLE_OF_ITS_SIZE, 64, 40, false, ADDRESSES | WITH_PORTS, true, true, 16 },
	/* cnxk/cnxk_ethdev_ops.c: cnxk_nix_reta_update; cnxk_nix_rss_hash_update, called at configuration, refuses other
	 * keys. cnxk/cnxk_ethdev_devargs.c: the table has 64 entries unless the argument `reta_size` says otherwise. */
	{ "cnxk", TABLE_OF_ITS_SIZE, 64, 48, true, ADDRESSES | WITH_PORTS | RTE_ETH_RSS_L2_PAYLOAD, true, true, 16 },
	/* ena/ena_rss.c: ena_rss_reta_update, ena_rss_reta_query; ena/ena_ethdev.h: ENA_ALL_RSS_HF. */
	{ "ena", TABLE_UP_TO_ITS_SIZE, 128, 40, false, WITH_PORTS, true, true, 16 },
	/* virtio/virtio_ethdev.c: virtio_dev_rss_reta_update, virtio_dev_rss_init. The driver does not hand the hash on:
	 * virtio_dev_info_get offers no RTE_ETH_RX_OFFLOAD_RSS_HASH. */
	{ "virtio", TABLE_OF_ITS_SIZE, 128, 40, true, ADDRESSES | WITH_PORTS, false, false, 16 },
	/* virtio again, on a host that does not offer VIRTIO_NET_F_RSS, as most do not. */
	{ "virtio-no-rss", TABLE_OF_ITS_SIZE, 0, 0, true, 0, false, false, 16 },
};

const struct profile *profile_of(const char *name)
{
	for (size_t i = 0; i < RTE_DIM(profiles); i++)
		if (strcmp(profiles[i].name, name) == 0)
			return &profiles[i];
	return NULL;
}
