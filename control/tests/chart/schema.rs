//! Validates values against a JSON schema, with the keywords that values.schema.json uses. An unknown keyword is an
//! error, so that no rule of the schema is silently ignored here.

use regex::Regex;
use serde_json::Value;

/// All errors in `value`, with their paths.
pub(crate) fn errors(schema: &Value, value: &Value) -> Vec<String> {
    let mut errors = Vec::new();
    check(schema, value, "", &mut errors);
    errors
}

fn check(schema: &Value, value: &Value, path: &str, errors: &mut Vec<String>) {
    for (keyword, rule) in schema.as_object().unwrap() {
        let holds = match keyword.as_str() {
            "$schema" | "title" => true,
            "type" => is_of_type(rule.as_str().unwrap(), value),
            "enum" => rule.as_array().unwrap().contains(value),
            "pattern" => value.as_str().is_none_or(|text| Regex::new(rule.as_str().unwrap()).unwrap().is_match(text)),
            "minLength" => value.as_str().is_none_or(|text| text.len() as u64 >= rule.as_u64().unwrap()),
            "minItems" => value.as_array().is_none_or(|items| items.len() as u64 >= rule.as_u64().unwrap()),
            "minimum" => value.as_i64().is_none_or(|number| number >= rule.as_i64().unwrap()),
            "maximum" => value.as_i64().is_none_or(|number| number <= rule.as_i64().unwrap()),
            "required" => value
                .as_object()
                .is_none_or(|fields| rule.as_array().unwrap().iter().all(|name| fields.contains_key(name.as_str().unwrap()))),
            "not" => !self::errors(rule, value).is_empty(),
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    check(rule, item, &format!("{path}[{index}]"), errors);
                }
                true
            }
            "propertyNames" => {
                for name in value.as_object().into_iter().flat_map(|fields| fields.keys()) {
                    check(rule, &Value::String(name.clone()), &format!("{path}.{name}"), errors);
                }
                true
            }
            "properties" | "additionalProperties" => {
                fields(keyword, schema, value, path, errors);
                true
            }
            other => panic!("unknown keyword {other}"),
        };
        if !holds {
            errors.push(format!("{path}: {keyword} {rule}, found {value}"));
        }
    }
}

fn fields(keyword: &str, schema: &Value, value: &Value, path: &str, errors: &mut Vec<String>) {
    for (name, field) in value.as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let known = schema.get("properties").and_then(|properties| properties.get(name));
        match (keyword, known, &schema["additionalProperties"]) {
            ("properties", Some(rule), _) => check(rule, field, &path, errors),
            ("additionalProperties", None, Value::Bool(false)) => errors.push(format!("{path}: no such value")),
            ("additionalProperties", None, rule) => check(rule, field, &path, errors),
            _ => {}
        }
    }
}

fn is_of_type(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64(),
        other => panic!("unknown type {other}"),
    }
}
