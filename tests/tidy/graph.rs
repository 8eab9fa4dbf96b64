//! A directed graph of names with imports on its arrows: its circles, and the order with the fewest upward imports.

use std::collections::{BTreeMap, BTreeSet};

use super::imports::{Import, imports};
use super::source::{Module, Package};

/// Nodes, and the imports on each arrow between two different nodes.
pub(crate) struct Graph {
    /// Names of the nodes, sorted.
    pub nodes: Vec<String>,
    /// The imports from one node to another, by their indices in `nodes`.
    pub arrows: BTreeMap<(usize, usize), Vec<Import>>,
    /// The number of imports from each node to each.
    weights: Vec<Vec<usize>>,
}

/// Nodes that import each other.
pub(crate) struct Circle {
    /// Their indices.
    pub nodes: Vec<usize>,
    /// Few arrows without which the circle is open.
    pub cuts: Vec<(usize, usize)>,
}

/// Name of a module at the top level: the first segment of its path; for the first file of a crate, the file's name.
pub(crate) fn top_level_name(module: &Module) -> String {
    let stem = || module.file.rsplit('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned();
    module.path.first().cloned().unwrap_or_else(stem)
}

impl Graph {
    /// The graph of the modules directly below the crates of a package.
    pub(crate) fn of_top_level(package: &Package) -> Self {
        Self::new(package, top_level_name)
    }

    /// The graph of the files of a package.
    pub(crate) fn of_files(package: &Package) -> Self {
        Self::new(package, |module| module.file.clone())
    }

    fn new(package: &Package, name: impl Fn(&Module) -> String) -> Self {
        let nodes: BTreeSet<String> = package.files().map(|(_, module)| name(module)).collect();
        let nodes: Vec<String> = nodes.into_iter().collect();
        let node = |module: usize| nodes.binary_search(&name(&package.modules[module])).unwrap_or_default();
        let mut arrows: BTreeMap<(usize, usize), Vec<Import>> = BTreeMap::new();
        for import in imports(package) {
            let (from, to) = (node(import.from), node(import.to));
            if from != to {
                arrows.entry((from, to)).or_default().push(import);
            }
        }
        let mut weights = vec![vec![0; nodes.len()]; nodes.len()];
        arrows.iter().for_each(|((from, to), imports)| weights[*from][*to] = imports.len());
        Self { nodes, arrows, weights }
    }

    /// The imports on all arrows.
    pub(crate) fn import_count(&self) -> usize {
        self.arrows.values().map(Vec::len).sum()
    }

    fn reachable(&self) -> Vec<BTreeSet<usize>> {
        let mut next: Vec<Vec<usize>> = vec![Vec::new(); self.nodes.len()];
        self.arrows.keys().for_each(|(from, to)| next[*from].push(*to));
        let all_from = |start: usize| {
            let mut found = BTreeSet::new();
            let mut open = next[start].clone();
            while let Some(node) = open.pop() {
                if found.insert(node) {
                    open.extend(&next[node]);
                }
            }
            found
        };
        (0..self.nodes.len()).map(all_from).collect()
    }

    /// Groups of nodes that import each other, directly or through others.
    pub(crate) fn circles(&self) -> Vec<Circle> {
        let reachable = self.reachable();
        let mut left: BTreeSet<usize> = (0..self.nodes.len()).filter(|node| reachable[*node].contains(node)).collect();
        let upward = if left.is_empty() { Vec::new() } else { self.upward(&self.best_order()) };
        let mut found = Vec::new();
        while let Some(first) = left.first().copied() {
            let is_in_circle = |node: &usize| reachable[first].contains(node) && reachable[*node].contains(&first);
            let nodes: BTreeSet<_> = left.iter().copied().filter(is_in_circle).collect();
            left.retain(|node| !nodes.contains(node));
            let is_within = |(from, to): &(usize, usize)| nodes.contains(from) && nodes.contains(to);
            let cuts = upward.iter().copied().filter(is_within).collect();
            found.push(Circle { nodes: nodes.into_iter().collect(), cuts });
        }
        found
    }

    /// An order of the nodes, importers first, with few imports against it: none where there is no circle.
    pub(crate) fn best_order(&self) -> Vec<usize> {
        let mut order = Vec::new();
        let mut left: BTreeSet<usize> = (0..self.nodes.len()).collect();
        while !left.is_empty() {
            let outgoing = |n: usize| left.iter().map(|other| self.weights[n][*other]).sum::<usize>();
            let incoming = |n: usize| left.iter().map(|other| self.weights[*other][n]).sum::<usize>();
            let surplus = |n: usize| (incoming(n) == 0, outgoing(n).cast_signed() - incoming(n).cast_signed());
            // The first of the best, so that the order is the same in every run.
            let best = left.iter().copied().rev().max_by_key(|n| surplus(*n)).unwrap_or_default();
            left.remove(&best);
            order.push(best);
        }
        while let Some(better) = self.improve(&order) {
            order = better;
        }
        order
    }

    /// Moves one node within the order so that fewer imports point upward.
    fn improve(&self, order: &[usize]) -> Option<Vec<usize>> {
        for (from, node) in order.iter().enumerate() {
            // Moving down past `other` turns the imports between the two around.
            let mut gain = 0_isize;
            for (to, other) in order.iter().enumerate().skip(from + 1) {
                gain += self.weights[*other][*node].cast_signed() - self.weights[*node][*other].cast_signed();
                if gain > 0 {
                    return Some(moved(order, from, to));
                }
            }
            gain = 0;
            for (to, other) in order.iter().enumerate().take(from).rev() {
                gain += self.weights[*node][*other].cast_signed() - self.weights[*other][*node].cast_signed();
                if gain > 0 {
                    return Some(moved(order, from, to));
                }
            }
        }
        None
    }

    /// The arrows from a later node of an order to an earlier one.
    pub(crate) fn upward(&self, order: &[usize]) -> Vec<(usize, usize)> {
        let place: BTreeMap<usize, usize> = order.iter().enumerate().map(|(place, node)| (*node, place)).collect();
        self.arrows.keys().copied().filter(|(from, to)| place.get(from) > place.get(to)).collect()
    }

    /// Length of the longest chain of arrows along an order, in nodes.
    pub(crate) fn levels(&self, order: &[usize]) -> usize {
        let mut level = vec![1; self.nodes.len()];
        let place: BTreeMap<usize, usize> = order.iter().enumerate().map(|(place, node)| (*node, place)).collect();
        for node in order.iter().rev() {
            let below = self.arrows.keys().filter(|(from, to)| from == node && place[from] < place[to]);
            level[*node] = below.map(|(_, to)| level[*to] + 1).max().unwrap_or(1);
        }
        level.into_iter().max().unwrap_or(0)
    }
}

fn moved(order: &[usize], from: usize, to: usize) -> Vec<usize> {
    let mut order = order.to_vec();
    let node = order.remove(from);
    order.insert(to, node);
    order
}
