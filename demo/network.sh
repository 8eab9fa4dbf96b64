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

make_network() {
  local ns n
  for ns in client gw sw b11 b12 b13; do
    ip netns add "$id-$ns"
    in_ns "$ns" ip link set lo up
    in_ns "$ns" sysctl -qw net.ipv6.conf.default.accept_dad=0
  done
  cable client eth0 gw uplink0
  in_ns client ip addr add 192.0.2.10/24 dev eth0
  in_ns client ip -6 addr add 2001:db8::10/64 dev eth0 nodad
  in_ns sw ip link add bridge type bridge
  in_ns sw ip link set bridge up
  cable gw cluster0 sw gw
  in_ns sw ip link set gw master bridge
  for n in "${backends[@]}"; do
    cable "b$n" eth0 sw "b$n"
    in_ns sw ip link set "b$n" master bridge
    in_ns "b$n" ip addr add "10.0.0.$n/24" dev eth0
    in_ns "b$n" ip -6 addr add "fd00::$n/64" dev eth0 nodad
  done
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
