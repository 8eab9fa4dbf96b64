//! `module-graph`: draws the modules of each package by their imports, as a page of Markdown.

mod graph;
mod imports;
mod order;
mod report;
mod rules;
mod source;
mod workspace;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use order::Orders;
use report::Report;
use source::Package;

/// Draws the modules of each package by their imports, and lists circles, full folders and type names that stand twice.
#[derive(Parser)]
struct Args {
    /// Root of the workspace.
    #[arg(long, default_value = ".")]
    root: PathBuf,
    /// Writes the page to this file instead of standard output.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Prints what the rules of tidy find, with lines, instead of the page; fails if they find something.
    #[arg(long)]
    check: bool,
    /// Only this package.
    package: Option<String>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("module-graph: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    let orders = order::parse(&fs::read_to_string(args.root.join(order::PAGE)).unwrap_or_default());
    let packages = workspace::read(&args.root)?;
    let is_wanted = |package: &&Package| args.package.as_ref().is_none_or(|name| *name == package.name);
    let wanted: Vec<_> = packages.iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        let names: Vec<_> = packages.iter().map(|package| package.name.as_str()).collect();
        return Err(format!("no package of this name; the workspace has {}", names.join(", ")));
    }
    if args.check {
        return check(&wanted, &orders);
    }
    let reports: Vec<_> = wanted.iter().map(|package| Report::new(package, &orders)).collect();
    let page = report::page(&reports);
    match &args.output {
        Some(file) => write(file, &page),
        None => {
            print!("{page}");
            Ok(())
        }
    }
}

fn check(packages: &[&Package], orders: &Orders) -> Result<(), String> {
    let problems: Vec<_> = packages.iter().flat_map(|package| rules::problems(package, orders)).collect();
    problems.iter().for_each(|problem| println!("{problem}"));
    if problems.is_empty() { Ok(()) } else { Err(format!("{} problems", problems.len())) }
}

fn write(file: &Path, page: &str) -> Result<(), String> {
    fs::write(file, page).map_err(|error| format!("{}: cannot be written: {error}", file.display()))
}
