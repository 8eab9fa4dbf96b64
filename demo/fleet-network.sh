# The network of a fleet: three gateways with the links of clients and of the cluster, a router that spreads flows over
# them by BGP, and one client behind the router and on the link. Sourced after demo/network.sh.
#
#   client 198.51.100.10 -- router 192.0.2.1 --\              /-- 192.0.2.2 [ gw0 ] 10.0.0.2 --\
#          192.0.2.10 -------------------------- uplinks --+---- 192.0.2.3 [ gw1 ] 10.0.0.3 ---+-- cluster -- b11, b12, b13
#                                                           \-- 192.0.2.4 [ gw2 ] 10.0.0.4 --/
#          d11, d12, d13 ---- answers of one-way modes ---------------------------------------------------- b11, b12, b13

gateways=(0 1 2)
# A server closes no connection because it was used often.
keepalive_requests=1000000

make_fleet() { # VIPs of one-way modes...
  local n bridge
  make_namespaces client router sw gw0 gw1 gw2 b11 b12 b13
  for bridge in uplinks cluster; do
    in_ns sw ip link add "$bridge" type bridge mcast_snooping 0
    in_ns sw ip link set "$bridge" up
  done
  cable client eth0 router inside
  in_ns client ip addr add 198.51.100.10/24 dev eth0
  in_ns client ip route add default via 198.51.100.1
  in_ns router ip addr add 198.51.100.1/24 dev inside
  # Flows, not clients, are spread.
  in_ns router sysctl -qw net.ipv4.ip_forward=1 net.ipv4.fib_multipath_hash_policy=1
  join_bridge router outside router uplinks
  in_ns router ip addr add 192.0.2.1/24 dev outside
  join_bridge client link0 client uplinks
  in_ns client ip addr add 192.0.2.10/24 dev link0
  for n in "${gateways[@]}"; do
    join_bridge "gw$n" uplink0 "uplink$n" uplinks
    in_ns "gw$n" ip link set uplink0 address "02:00:00:00:aa:0$n"
    join_bridge "gw$n" cluster0 "cluster$n" cluster
  done
  connect_backends cluster
  make_direct_ways 192.0.2.2=10.0.0.2 192.0.2.3=10.0.0.3 192.0.2.4=10.0.0.4 -- "$@"
}

join_bridge() { # namespace interface port-of-the-bridge bridge
  cable "$1" "$2" sw "$3"
  in_ns sw ip link set "$3" master "$4"
}

# The configuration of a gateway. Its Services come from the controller at $work/config.sock.
write_gateway_configuration() { # gateway lines...
  local n=$1
  shift
  mkdir -p "$work/gw$n"
  {
    cat <<YAML
name: edge-$n
ports:
  - {name: uplink, device: "net_af_packet0,iface=uplink0", addresses: [192.0.2.$((n + 2))/24]}
  - {name: cluster, device: "net_af_packet1,iface=cluster0", addresses: [10.0.0.$((n + 2))/24]}
workers: {cores: [$((n % $(nproc)))], poll: adaptive}
memory: {hugepages: off}
flows: {maxPerWorker: 65536}
tunnel: {sources: [10.0.0.$((n + 2))]}
stateDir: $work/gw$n/state
controller: {urls: ["unix:$work/config.sock"]}
admin: {listen: "unix:$work/gw$n/admin.sock"}
YAML
    printf '%s\n' "$@"
  } >"$work/gw$n/sluice.yaml"
}

# Announces the VIPs of a gateway that runs, by BIRD.
start_bird() { # gateway sluicectl interval-ms multiplier
  local dir="$work/gw$1"
  in_ns "gw$1" ip route replace default via 192.0.2.1 dev uplink
  "$2" --server "unix:$dir/admin.sock" config bird --local-as 64512 --peer 192.0.2.1=64513 \
    --bfd --bfd-interval "$3" --bfd-multiplier "$4" >"$dir/bird.conf" || return 1
  in_ns "gw$1" bird -c "$dir/bird.conf" -s "$dir/bird.ctl" -P "$dir/bird.pid"
}

# The router's FRR: ECMP over the gateways that announce a VIP. FRR gives up its rights, hence the owner of the directory.
start_frr() { # interval-ms multiplier
  local dir="$work/frr" n daemon
  chmod 711 "$work"
  mkdir -p "$dir"
  echo "hostname router" >"$dir/zebra.conf"
  {
    echo "bfd"
    for n in "${gateways[@]}"; do
      echo " peer 192.0.2.$((n + 2))
  receive-interval $1
  transmit-interval $1
  detect-multiplier $2"
    done
  } >"$dir/bfdd.conf"
  {
    echo "router bgp 64513
 bgp router-id 192.0.2.1
 no bgp ebgp-requires-policy"
    for n in "${gateways[@]}"; do
      echo " neighbor 192.0.2.$((n + 2)) remote-as 64512
 neighbor 192.0.2.$((n + 2)) bfd
 neighbor 192.0.2.$((n + 2)) timers connect 1
 neighbor 192.0.2.$((n + 2)) advertisement-interval 0"
    done
    echo " address-family ipv4 unicast
  maximum-paths 8"
  } >"$dir/bgpd.conf"
  chown -R frr:frr "$dir"
  for daemon in zebra bfdd bgpd; do
    in_ns router "/usr/lib/frr/$daemon" -d -f "$dir/$daemon.conf" -i "$dir/$daemon.pid" --vty_socket "$dir" \
      -z "$dir/zserv.api" -u frr -g frr --log "file:$dir/$daemon.log" 2>>"$dir/$daemon.log" || return 1
  done
}

# Whether a process has not ended. One that has may wait for seconds until init takes note of it.
is_running() { [ -e "/proc/$1/status" ] && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }

# Ends processes and waits until they have ended.
stop_processes() { # process IDs...
  local pid
  for pid in "$@"; do kill "$pid" 2>/dev/null; done
  for pid in "$@"; do
    while is_running "$pid"; do sleep 0.02; done
  done
}

# The same for programs that wrote a file of their process IDs. FRR takes its routes out of Linux at its end.
stop_programs() { # files...
  local file
  for file in "$@"; do
    [ ! -e "$file" ] || stop_processes "$(cat "$file")"
    rm -f "$file"
  done
}

stop_frr() { stop_programs "$work"/frr/{bgpd,bfdd,zebra}.pid; }

# The number of the router's ways to a VIP.
ways_to() { in_ns router ip route show "$1" | grep -c "via 192.0.2"; }

remove_fleet() {
  stop_frr
  stop_programs "$work"/gw*/bird.pid
  remove_network
}
