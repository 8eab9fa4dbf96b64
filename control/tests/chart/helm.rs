//! Renders a chart as Helm does, with the features that the chart of this repository uses: Go templates and the Helm
//! functions `include`, `toYaml`, `nindent`, `quote`, `default`, `omit` and `sha256sum`. Any other function is an
//! error.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

use gtmpl_ng::{Context, Func, FuncError, Template, Value as Go};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

thread_local! {
    /// Named templates, for `include`. Template functions have access to their arguments only.
    static NAMED: RefCell<String> = const { RefCell::new(String::new()) };
}

const FUNCTIONS: [(&str, Func); 7] = [
    ("include", include),
    ("toYaml", to_yaml),
    ("nindent", nindent),
    ("quote", quote),
    ("default", default),
    ("omit", omit),
    ("sha256sum", sha256sum),
];

/// The documents that `helm template RELEASE CHART --namespace NAMESPACE` prints, with `values` merged over the chart's
/// values.
pub(crate) fn render(chart: &Path, release: &str, namespace: &str, values: &Value) -> Result<Vec<Value>, String> {
    let about = read_yaml(&chart.join("Chart.yaml"));
    let mut effective = read_yaml(&chart.join("values.yaml"));
    merge(&mut effective, values);
    let context = json!({
        "Values": effective,
        "Release": {"Name": release, "Namespace": namespace},
        "Chart": {"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"]},
    });
    let mut files: Vec<_> = fs::read_dir(chart.join("templates")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let (named, files): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|file| file.file_name().unwrap().to_string_lossy().starts_with('_'));
    NAMED.set(named.iter().map(|file| fs::read_to_string(file).unwrap()).collect());
    let mut documents = Vec::new();
    for file in files {
        let text =
            execute(&fs::read_to_string(&file).unwrap(), from_json(&context)).map_err(|e| format!("{}: {e}", file.display()))?;
        documents.extend(documents_of(&text)?);
    }
    Ok(documents)
}

/// The chart's values merged with `over`, as Helm does it: maps key by key; everything else is replaced.
pub(crate) fn merge(values: &mut Value, over: &Value) {
    match (values, over) {
        (Value::Object(values), Value::Object(over)) => {
            for (key, value) in over {
                merge(values.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (values, over) => over.clone_into(values),
    }
}

/// All non-empty documents of a YAML text.
pub(crate) fn documents_of(text: &str) -> Result<Vec<Value>, String> {
    let parts = text.split("\n---").map(|part| part.trim_start_matches("---"));
    let documents = parts.map(|part| serde_saphyr::from_str::<Value>(part).map_err(|error| format!("{error}\n{part}")));
    documents.filter(|document| document != &Ok(Value::Null)).collect()
}

pub(crate) fn read_yaml(file: &Path) -> Value {
    serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

fn execute(text: &str, context: Go) -> Result<String, String> {
    let mut template = Template::default();
    template.add_funcs(&FUNCTIONS);
    let whole = NAMED.with_borrow(|named| format!("{named}{text}"));
    template.parse(whole).map_err(|error| error.to_string())?;
    template.render(&Context::from(context)).map_err(|error| error.to_string())
}

fn from_json(value: &Value) -> Go {
    match value {
        Value::Null => Go::Nil,
        Value::Bool(value) => Go::Bool(*value),
        Value::Number(number) => match number.as_i64() {
            Some(number) => Go::Number(number.into()),
            None => Go::Number(number.as_f64().unwrap().into()),
        },
        Value::String(text) => Go::String(text.clone()),
        Value::Array(items) => Go::Array(items.iter().map(from_json).collect()),
        Value::Object(fields) => {
            Go::Map(fields.iter().map(|(key, value)| (key.clone(), from_json(value))).collect::<HashMap<_, _>>())
        }
    }
}

fn to_json(value: &Go) -> Value {
    match value {
        Go::Bool(value) => json!(value),
        Go::Number(number) => number.as_i64().map_or_else(|| json!(number.as_f64()), |number| json!(number)),
        Go::String(text) => json!(text),
        Go::Array(items) => items.iter().map(to_json).collect(),
        Go::Object(fields) | Go::Map(fields) => {
            Value::Object(fields.iter().map(|(key, value)| (key.clone(), to_json(value))).collect::<Map<_, _>>())
        }
        _ => Value::Null,
    }
}

fn wrong(function: &str, arguments: &[Go]) -> FuncError {
    FuncError::Generic(format!("{function} of {arguments:?}"))
}

fn include(arguments: &[Go]) -> Result<Go, FuncError> {
    let [Go::String(name), context] = arguments else { return Err(wrong("include", arguments)) };
    execute(&format!("{{{{ template {name:?} . }}}}"), context.clone()).map(Go::String).map_err(FuncError::Generic)
}

fn to_yaml(arguments: &[Go]) -> Result<Go, FuncError> {
    let [value] = arguments else { return Err(wrong("toYaml", arguments)) };
    let text = serde_saphyr::to_string(&to_json(value)).map_err(|error| FuncError::Generic(error.to_string()))?;
    Ok(Go::String(text.trim_end().to_owned()))
}

fn nindent(arguments: &[Go]) -> Result<Go, FuncError> {
    let [Go::Number(width), Go::String(text)] = arguments else { return Err(wrong("nindent", arguments)) };
    let blanks = " ".repeat(usize::try_from(width.as_i64().unwrap_or_default()).unwrap_or_default());
    Ok(Go::String(text.split('\n').map(|line| format!("\n{blanks}{line}")).collect()))
}

fn quote(arguments: &[Go]) -> Result<Go, FuncError> {
    let [Go::String(text)] = arguments else { return Err(wrong("quote", arguments)) };
    Ok(Go::String(format!("{text:?}")))
}

/// The second argument, or the first if the second is empty.
fn default(arguments: &[Go]) -> Result<Go, FuncError> {
    let [fallback, value] = arguments else { return Err(wrong("default", arguments)) };
    let is_empty =
        matches!(value, Go::NoValue | Go::Nil | Go::Bool(false)) || matches!(value, Go::String(text) if text.is_empty());
    Ok(if is_empty { fallback.clone() } else { value.clone() })
}

/// A map without these keys.
fn omit(arguments: &[Go]) -> Result<Go, FuncError> {
    let [Go::Object(fields) | Go::Map(fields), keys @ ..] = arguments else { return Err(wrong("omit", arguments)) };
    let is_left_out = |key: &String| keys.iter().any(|left_out| matches!(left_out, Go::String(left_out) if left_out == key));
    Ok(Go::Map(fields.iter().filter(|(key, _)| !is_left_out(key)).map(|(key, value)| (key.clone(), value.clone())).collect()))
}

fn sha256sum(arguments: &[Go]) -> Result<Go, FuncError> {
    let [Go::String(text)] = arguments else { return Err(wrong("sha256sum", arguments)) };
    Ok(Go::String(Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()))
}
