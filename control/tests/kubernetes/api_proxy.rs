//! A proxy between a controller and its API server that can be cut: it simulates an outage on any cluster.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use kube::config::Kubeconfig;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub struct ApiProxy {
    is_connected: watch::Sender<bool>,
    address: SocketAddr,
}

impl ApiProxy {
    /// A proxy to `host:port` that forwards connections. It stops with the runtime.
    async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let is_connected = watch::Sender::new(true);
        let seen = is_connected.subscribe();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                if *seen.borrow() {
                    tokio::spawn(forward(stream, target.clone(), seen.clone()));
                }
            }
        });
        Self { is_connected, address }
    }

    /// Writes a kubeconfig that reaches its cluster over a new proxy, with `namespace` as the namespace of its context.
    pub async fn write_kubeconfig(from: &Path, to: &PathBuf, namespace: &str) -> Self {
        let mut config = serde_json::to_value(Kubeconfig::read_from(from).unwrap()).unwrap();
        let current = config["current-context"].clone();
        let context = named(&mut config["contexts"], &current);
        context["context"]["namespace"] = namespace.into();
        let name = context["context"]["cluster"].clone();
        let cluster = &mut named(&mut config["clusters"], &name)["cluster"];
        let server: http::Uri = cluster["server"].as_str().unwrap().parse().unwrap();
        let (scheme, host) = (server.scheme_str().unwrap(), server.host().unwrap());
        let port = server.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        let proxy = Self::start(format!("{host}:{port}")).await;
        if scheme == "https" && cluster["tls-server-name"].is_null() {
            cluster["tls-server-name"] = host.trim_matches(['[', ']']).into();
        }
        cluster["server"] = format!("{scheme}://{}{}", proxy.address, server.path().trim_end_matches('/')).into();
        // JSON is YAML.
        std::fs::write(to, config.to_string()).unwrap();
        proxy
    }

    /// Closes every connection and refuses new ones until `restore`.
    pub fn cut(&self) {
        self.is_connected.send_replace(false);
    }

    pub fn restore(&self) {
        self.is_connected.send_replace(true);
    }
}

fn named<'a>(list: &'a mut Value, name: &Value) -> &'a mut Value {
    list.as_array_mut().unwrap().iter_mut().find(|entry| entry["name"] == *name).unwrap()
}

async fn forward(mut client: TcpStream, target: String, mut is_connected: watch::Receiver<bool>) {
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
        _ = is_connected.wait_for(|is_connected| !is_connected) => {}
    }
}
