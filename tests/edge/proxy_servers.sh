# Servers that expect a PROXY header, each beside the same server without. Sourced after demo/network.sh.
#
#   b11 nginx    8081 HTTP, 8443 TLS with a header; 9081, 9443 without
#   b12 haproxy  the same ports, in front of an nginx that serves the files
#   b13 Postfix  2525 with a header; 2526 without
#
# Each logs a line for each connection or request to $work/bN/log, with the address of the client and the server's port.

# The nginx of a backend: a file for GET, and PUT to a directory.
start_files() { # backend, more servers
  local n=$1 dir="$work/b$1"
  stop_server "$n"
  mkdir -p "$dir/files/up"
  chmod 777 "$dir/files/up"
  cat >"$dir/nginx.conf" <<CONF
pid $dir/pid;
error_log $dir/error.log info;
master_process off;
user root;
events { worker_connections 1024; }
http {
  default_type application/octet-stream;
  log_format client '\$remote_addr \$server_port \$request_method \$status';
  access_log off;
  client_max_body_size 16m;
  client_body_temp_path $dir/body;
  root $dir/files;
  keepalive_timeout 600s; client_header_timeout 600s; client_body_timeout 600s; send_timeout 600s;
  $2
}
CONF
  in_ns "b$n" nginx -c "$dir/nginx.conf" -p "$dir"
}

start_nginx_with_headers() {
  local dir="$work/b11" tls="ssl_certificate $PWD/tests/edge/p521.pem; ssl_certificate_key $PWD/tests/edge/p521.key;"
  local common="access_log $dir/log client; dav_methods PUT;"
  local real="set_real_ip_from 0.0.0.0/0; set_real_ip_from ::/0; real_ip_header proxy_protocol;"
  start_files 11 "
  server { listen 8081 proxy_protocol; listen [::]:8081 proxy_protocol; $common $real }
  server { listen 8443 ssl proxy_protocol; listen [::]:8443 ssl proxy_protocol; $common $real $tls }
  server { listen 9081; listen [::]:9081; $common }
  server { listen 9443 ssl; listen [::]:9443 ssl; $common $tls }"
}

start_haproxy_with_headers() {
  local dir="$work/b12"
  start_files 12 "server { listen 127.0.0.1:9000; dav_methods PUT; }"
  cat tests/edge/p521.pem tests/edge/p521.key >"$dir/both.pem"
  cat >"$dir/haproxy.cfg" <<CONF
global
  log stdout format raw local0
  ssl-default-bind-options ssl-min-ver TLSv1.2
defaults
  mode http
  log global
  log-format "%ci %fp %HM %ST"
  timeout connect 10s
  timeout client 600s
  timeout server 600s
  default_backend files
frontend with_headers
  bind :8081 accept-proxy
  bind :::8081 v6only accept-proxy
  bind :8443 accept-proxy ssl crt $dir/both.pem
  bind :::8443 v6only accept-proxy ssl crt $dir/both.pem
frontend without
  bind :9081
  bind :::9081 v6only
  bind :9443 ssl crt $dir/both.pem
  bind :::9443 v6only ssl crt $dir/both.pem
backend files
  server nginx 127.0.0.1:9000
CONF
  in_ns b12 haproxy -db -f "$dir/haproxy.cfg" >"$dir/log" 2>&1 </dev/null &
  echo $! >"$dir/haproxy.pid"
}

start_postfix_with_headers() {
  local dir="$work/b13"
  stop_server 13
  chmod 755 "$work"
  mkdir -p "$dir/etc" "$dir/queue" "$dir/data"
  chown postfix "$dir/data"
  cat >"$dir/etc/main.cf" <<CONF
compatibility_level = 3.6
queue_directory = $dir/queue
data_directory = $dir/data
command_directory = /usr/sbin
daemon_directory = $(postconf -dh daemon_directory)
maillog_file = $dir/log
maillog_file_prefixes = $dir
myhostname = b13.example
mydestination = example
local_recipient_maps =
local_transport = discard
disable_dns_lookups = yes
smtpd_peername_lookup = no
smtpd_relay_restrictions = permit_auth_destination, reject
smtpd_client_connection_count_limit = 0
smtpd_upstream_proxy_timeout = 600s
smtpd_timeout = 600s
message_size_limit = 16000000
CONF
  cat >"$dir/etc/master.cf" <<CONF
2525 inet n - n - 100 smtpd -o smtpd_upstream_proxy_protocol=haproxy -o syslog_name=postfix/2525
2526 inet n - n - 100 smtpd -o syslog_name=postfix/2526
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
rewrite unix - - n - - trivial-rewrite
bounce unix - - n - 0 bounce
discard unix - - n - - discard
error unix - - n - - error
anvil unix - - n - 1 anvil
proxymap unix - - n - - proxymap
postlog unix-dgram n - n - 1 postlogd
CONF
  in_ns b13 postfix -c "$dir/etc" start >"$dir/start.log" 2>&1 || { cat "$dir/start.log" >&2; return 1; }
}

stop_proxy_servers() {
  in_ns b13 postfix -c "$work/b13/etc" stop >/dev/null 2>&1 || true
  kill "$(cat "$work/b12/haproxy.pid" 2>/dev/null)" 2>/dev/null || true
}

# Drops packets at random, in both directions: at the bridge between gateway and backends, and at the router between
# client and gateway.
lose() { # packets of a thousand
  local place
  for place in "sw bridge" "router inet"; do
    set -- "$1" $place
    in_ns "$2" nft "add table $3 lossy; delete table $3 lossy"
    [ "$1" = 0 ] || in_ns "$2" nft "add table $3 lossy
      add chain $3 lossy forward { type filter hook forward priority 0; }
      add rule $3 lossy forward meta l4proto { tcp, udp } numgen random mod 1000 < $1 counter drop"
  done
}
