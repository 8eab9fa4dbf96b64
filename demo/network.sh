# The network of the demo, in its own namespaces. Sourced; needs $id (unique, at most 8 characters) and the directory $work.
#
#   client 192.0.2.10 -- uplink [ gateway ] cluster -- bridge -- b1 10.0.0.11, b2 10.0.0.12, b3 10.0.0.13

backends=(11 12 13)
offloads=(tx off rx off tso off gso off gro off)

in_ns() { local ns=$1; shift; ip netns exec "$id-$ns" "$@"; }

# A veth pair between two namespaces, without offloads at both ends: otherwise af_packet delivers partial checksums.
cable() { # namespace interface namespace interface
  ip link add "$2" netns "$id-$1" type veth peer name "$4" netns "$id-$3"
  in_ns "$1" ethtool -K "$2" "${offloads[@]}" >/dev/null 2>&1
  in_ns "$3" ethtool -K "$4" "${offloads[@]}" >/dev/null 2>&1
  in_ns "$1" ip link set "$2" up
  in_ns "$3" ip link set "$4" up
}

make_namespaces() { # names...
  local ns
  for ns in "$@"; do
    ip netns add "$id-$ns"
    in_ns "$ns" ip link set lo up
    in_ns "$ns" sysctl -qw net.ipv6.conf.default.accept_dad=0
  done
}

make_network() {
  make_namespaces client gw sw b11 b12 b13
  cable client eth0 gw uplink0
  in_ns client ip addr add 192.0.2.10/24 dev eth0
  in_ns client ip -6 addr add 2001:db8::10/64 dev eth0 nodad
  in_ns sw ip link add bridge type bridge
  in_ns sw ip link set bridge up
  cable gw cluster0 sw gw
  in_ns sw ip link set gw master bridge
  connect_backends bridge
}

connect_backends() { # bridge
  local n
  for n in "${backends[@]}"; do
    cable "b$n" eth0 sw "b$n"
    in_ns sw ip link set "b$n" master "$1"
    in_ns "b$n" ip addr add "10.0.0.$n/24" dev eth0
    in_ns "b$n" ip -6 addr add "fd00::$n/64" dev eth0 nodad
  done
}

# For one-way modes with a client at 198.51.100.10: a direct way from each backend to the client, the routes to the
# gateways that probe, the VIPs on the backends' loopback, and a device for the end of tunnels.
make_direct_ways() { # routes (address of a gateway=via), --, VIPs...
  local routes=() n mac
  while [ "$1" != -- ]; do routes+=("$1"); shift; done
  shift
  for n in "${backends[@]}"; do
    cable "b$n" direct0 client "d$n"
    mac=$(in_ns client cat "/sys/class/net/d$n/address")
    in_ns "b$n" ip route replace 198.51.100.10/32 dev direct0
    in_ns "b$n" ip neigh replace 198.51.100.10 lladdr "$mac" nud permanent dev direct0
    local route vip
    for route in "${routes[@]}"; do in_ns "b$n" ip route replace "${route%=*}/32" via "${route#*=}"; done
    for vip in "$@"; do in_ns "b$n" ip addr add "$vip/32" dev lo; done
    in_ns "b$n" ip tuntap add dev tunnel0 mode tun
    in_ns "b$n" ip link set tunnel0 up
    in_ns "b$n" sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.eth0.rp_filter=0 net.ipv4.conf.tunnel0.rp_filter=0
    in_ns client sysctl -qw "net.ipv4.conf.d$n.rp_filter=0"
  done
  in_ns client sysctl -qw net.ipv4.conf.all.rp_filter=0
}

# Starts an HTTP server in the namespace of backend $1. It answers with its name, and is one process, so that
# one kill ends it.
start_server() {
  local n=$1 dir="$work/b$1"
  mkdir -p "$dir"
  cat >"$dir/nginx.conf" <<CONF
pid $dir/pid;
error_log $dir/error.log;
master_process off;
events { worker_connections 512; }
http {
  access_log off;
  keepalive_requests ${keepalive_requests:-1000};
  server {
    listen 8080; listen [::]:8080; default_type text/plain;
    root $dir;
    location = / { return 200 "b$n\n"; }
    location /client { return 200 "\$remote_addr\n"; }
  }
}
CONF
  in_ns "b$n" nginx -c "$dir/nginx.conf" -p "$dir" 2>>"$dir/error.log"
}

stop_server() {
  local pid
  pid=$(cat "$work/b$1/pid" 2>/dev/null) && kill -9 "$pid" 2>/dev/null && rm -f "$work/b$1/pid"
}

remove_network() {
  local ns n
  for n in "${backends[@]}"; do stop_server "$n"; done
  for ns in $(ip netns list | awk -v own="$id-" 'index($1, own) == 1 { print $1 }'); do ip netns del "$ns"; done
}
