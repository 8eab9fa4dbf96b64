//! Services in the API server: defaults at creation, and validation of their status.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::responses::ApiResponse;

/// Fills in defaults. `number` makes allocated values unique.
pub fn set_defaults(service: &mut Value, number: u64) {
    service["status"] = json!({"loadBalancer": {}});
    let spec = &mut service["spec"];
    let low = number % 200 + 1;
    let kind = spec["type"].as_str().unwrap_or("ClusterIP").to_owned();
    let is_external = kind != "ClusterIP" && kind != "ExternalName";
    let mut defaults = vec![
        ("type", json!(kind)),
        ("sessionAffinity", json!("None")),
        ("internalTrafficPolicy", json!("Cluster")),
        ("ipFamilies", json!(["IPv4"])),
        ("ipFamilyPolicy", json!("SingleStack")),
        ("clusterIP", json!(format!("10.96.0.{low}"))),
        ("clusterIPs", json!([format!("10.96.0.{low}")])),
    ];
    if is_external {
        defaults.push(("externalTrafficPolicy", json!("Cluster")));
    }
    if kind == "LoadBalancer" {
        defaults.push(("allocateLoadBalancerNodePorts", json!(true)));
    }
    for (key, value) in defaults {
        if spec[key].is_null() {
            spec[key] = value;
        }
    }
    let ports = spec["ports"].as_array_mut().map(Vec::as_mut_slice).unwrap_or_default();
    for (index, port) in (0_u64..).zip(ports) {
        if port["protocol"].is_null() {
            port["protocol"] = "TCP".into();
        }
        if port["targetPort"].is_null() {
            port["targetPort"] = port["port"].clone();
        }
        if is_external && port["nodePort"].is_null() {
            port["nodePort"] = (30_000 + number * 10 % 2_700 + index).into();
        }
    }
}

/// A Service that is no longer a load balancer loses the fields of one, in the same version. Conditions stay.
pub fn clear_after_type_change(service: &mut Value) {
    if service["spec"]["type"] != "LoadBalancer" {
        service["status"]["loadBalancer"] = json!({});
        if let Some(spec) = service["spec"].as_object_mut() {
            spec.remove("loadBalancerClass");
            spec.remove("allocateLoadBalancerNodePorts");
        }
    }
}

/// Sets the defaults of a status and validates it as the server does.
pub fn check_status(service: &mut Value) -> Result<(), ApiResponse> {
    let name = service["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let is_load_balancer = service["spec"]["type"] == "LoadBalancer";
    if !service["status"]["loadBalancer"].is_object() {
        service["status"]["loadBalancer"] = json!({});
    }
    let load_balancer = &mut service["status"]["loadBalancer"];
    let is_empty = load_balancer["ingress"].as_array().is_none_or(Vec::is_empty);
    if is_empty {
        load_balancer.as_object_mut().map(|object| object.remove("ingress"));
        return Ok(());
    }
    if !is_load_balancer {
        let message = "Forbidden: may only be used when `spec.type` is 'LoadBalancer'";
        return Err(ApiResponse::invalid("Service", &name, "FieldValueForbidden", "status.loadBalancer.ingress", message));
    }
    let entries = load_balancer["ingress"].as_array_mut().map(Vec::as_mut_slice).unwrap_or_default();
    for (index, entry) in entries.iter_mut().enumerate() {
        check_ingress(&name, &format!("status.loadBalancer.ingress[{index}]"), entry)?;
    }
    Ok(())
}

fn check_ingress(name: &str, at: &str, entry: &mut Value) -> Result<(), ApiResponse> {
    let invalid = |field: &str, value: &str, what: &str| {
        ApiResponse::invalid(
            "Service",
            name,
            "FieldValueInvalid",
            &format!("{at}.{field}"),
            &format!("Invalid value: \"{value}\": {what}"),
        )
    };
    if let Some(hostname) = entry["hostname"].as_str()
        && hostname.parse::<IpAddr>().is_ok()
    {
        return Err(invalid("hostname", hostname, "must be a DNS name, not an IP address"));
    }
    let Some(ip) = entry["ip"].as_str().map(str::to_owned) else {
        if entry["ipMode"].is_null() {
            entry.as_object_mut().map(|object| object.remove("ipMode"));
            return Ok(());
        }
        let message = "Forbidden: may not be specified when `ip` is not set";
        return Err(ApiResponse::invalid("Service", name, "FieldValueForbidden", &format!("{at}.ipMode"), message));
    };
    match ip.parse::<IpAddr>() {
        Err(_) if has_leading_zeros(&ip) => return Err(invalid("ip", &ip, "must not have leading 0s")),
        Err(_) => return Err(invalid("ip", &ip, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")),
        Ok(IpAddr::V6(v6)) if v6.to_ipv4_mapped().is_some() => {
            return Err(invalid("ip", &ip, "must not be an IPv4-mapped IPv6 address"));
        }
        Ok(_) => {}
    }
    match entry["ipMode"].as_str() {
        Some("VIP" | "Proxy") => Ok(()),
        None => {
            entry["ipMode"] = "VIP".into();
            Ok(())
        }
        Some(other) => {
            let message = format!("Unsupported value: \"{other}\": supported values: \"Proxy\", \"VIP\"");
            Err(ApiResponse::invalid("Service", name, "FieldValueNotSupported", &format!("{at}.ipMode"), &message))
        }
    }
}

/// An IPv4 address that is valid except for leading zeros in an octet.
fn has_leading_zeros(ip: &str) -> bool {
    let parts: Vec<_> = ip.split('.').collect();
    parts.len() == 4
        && parts.iter().all(|part| part.parse::<u8>().is_ok())
        && parts.iter().any(|part| part.len() > 1 && part.starts_with('0'))
}
