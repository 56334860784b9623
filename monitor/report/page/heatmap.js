'use strict'
// A heat map of cells of one byte. The browser never scales it: where cells share a pixel, the greatest of them is painted.

const PALETTE = [[0, [68, 1, 84]], [0.25, [59, 82, 139]], [0.5, [33, 145, 140]], [0.75, [94, 201, 98]], [1, [253, 231, 37]]]
const NOT_RECORDED = [139, 146, 156], STRIPE = [196, 201, 208], DIFFERS = [214, 0, 147], INFINITE = [230, 97, 0], NAN = [179, 0, 27]
const CALM_STRIPE = [112, 84, 128]
const LEAST_HEIGHT = 60, MOST_HEIGHT = 460, ROW_HEIGHT = 16, TEXT_HEIGHT = 12

const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0

// Two colours for each code, which alternate in stripes where they differ.
function coloursOf(codes) {
  const plain = new Uint32Array(256).fill(packed(NOT_RECORDED)), striped = new Uint32Array(256).fill(packed(NOT_RECORDED))
  const levels = codes.differs - codes.least - 1
  for (let level = 0; level < levels; level++) {
    const code = codes.least + level + (level >= codes.calm ? 1 : 0)
    plain[code] = striped[code] = packed(between(level / (levels - 1)))
  }
  plain[codes.warmUp] = packed(PALETTE[0][1])
  striped[codes.warmUp] = packed(CALM_STRIPE)
  striped[codes.partly] = packed(STRIPE)
  plain[codes.differs] = striped[codes.differs] = packed(DIFFERS)
  plain[codes.infinite] = striped[codes.infinite] = packed(INFINITE)
  plain[codes.nan] = striped[codes.nan] = packed(NAN)
  return { plain, striped }
}

// Colours of ratios: odd codes are larger, even ones smaller, and the greater the code, the further from the same.
function ratioColours({ least, alone, infinite }) {
  const plain = new Uint32Array(256).fill(packed(NOT_RECORDED)), striped = plain.slice(), furthest = alone - least >> 1
  const ramps = ['--more', '--less'].map(end => [[0, channels('--same')], [1, channels(end)]])
  for (let code = least; code < alone; code++) {
    plain[code] = striped[code] = packed(between((code - least >> 1) / (furthest - 1), ramps[code - least & 1]))
  }
  striped[alone] = packed(STRIPE)
  plain[infinite] = striped[infinite] = packed(NAN)
  return { plain, striped }
}

const channels = name => [1, 3, 5].map(place => parseInt(colour(name).slice(place, place + 2), 16))

function between(share, palette = PALETTE) {
  const place = Math.max(1, palette.findIndex(([end]) => share <= end))
  const [from, a] = palette[place - 1], [to, b] = palette[place]
  return a.map((one, i) => Math.round(one + (b[i] - one) * (share - from) / (to - from)))
}

// Cells as pixels of a width and a height: the greatest of those that share one.
function reduced(cells, rows, columns, width, height) {
  const found = new Uint8Array(width * height)
  const place = Uint16Array.from({ length: columns }, (_, column) => Math.floor(column * width / columns))
  for (let row = 0; row < rows; row++) {
    const to = Math.floor(row * height / rows) * width, from = row * columns
    for (let column = 0; column < columns; column++) {
      const pixel = to + place[column], code = cells[from + column]
      if (code > found[pixel]) found[pixel] = code
    }
  }
  return found
}

function paint(canvas, cells, rows, columns, colours, width, height) {
  canvas.width = width
  canvas.height = height
  const context = canvas.getContext('2d'), image = context.createImageData(width, height)
  const pixels = new Uint32Array(image.data.buffer)
  const across = Math.min(columns, width), down = Math.min(rows, height)
  const codes = reduced(cells, rows, columns, across, down)
  const place = Uint16Array.from({ length: width }, (_, x) => Math.floor(x * across / width))
  for (let y = 0; y < height; y++) {
    const row = Math.floor(y * down / height) * across
    for (let x = 0; x < width; x++) {
      const code = codes[row + place[x]]
      pixels[y * width + x] = (x + y) % 8 < 3 ? colours.striped[code] : colours.plain[code]
    }
  }
  context.putImageData(image, 0, 0)
}

function element(tag, parent, text, name) {
  const made = document.createElement(tag)
  if (text !== undefined) made.textContent = text
  if (name) made.className = name
  if (parent) parent.append(made)
  return made
}

// An entry of a legend: cells, and what they mean.
function sample(list, colours, codes, width, text) {
  const item = element('li', list)
  paint(element('canvas', item), new Uint8Array(codes), 1, codes.length, colours, width, 14)
  item.append(text)
}

// The beginning and the end of a name.
const shortened = (name, most) => name.length > most ? name.slice(0, most / 2 - 1) + '…' + name.slice(-most / 2) : name

class HeatMap {
  // shown(row, column) is called when the cursor moves, chosen(row, column) when a cell is chosen.
  constructor(parent, label, colours, shown, chosen) {
    const map = element('div', parent, undefined, 'map')
    this.labels = element('canvas', map)
    this.labels.setAttribute('aria-hidden', 'true')
    this.field = element('div', map, undefined, 'field')
    this.canvas = element('canvas', this.field, undefined, 'cells')
    this.cursor = element('div', this.field, undefined, 'cursor')
    element('div', map)
    this.axis = element('canvas', map)
    this.axis.setAttribute('aria-hidden', 'true')
    this.canvas.tabIndex = 0
    this.canvas.setAttribute('role', 'application')
    this.canvas.setAttribute('aria-label', label + '. Arrow keys move from cell to cell, Enter chooses a cell.')
    this.colours = colours
    this.shown = shown
    this.chosen = chosen
    this.row = this.column = 0
    this.canvas.addEventListener('mousemove', event => this.move(...this.at(event)))
    this.canvas.addEventListener('click', event => { this.move(...this.at(event)); this.chosen(this.row, this.column) })
    this.canvas.addEventListener('keydown', event => this.key(event))
    this.canvas.addEventListener('focus', () => this.move(this.row, this.column))
  }

  // rowName and columnName give texts; marks are { at, what }; ticks(count) gives columns to name, by default evenly spread ones.
  show({ cells, rows, columns, rowName, columnName, marks, ticks }) {
    const spread = count => Array.from({ length: Math.min(count, columns) }, (_, tick) => Math.floor(tick * columns / Math.min(count, columns)))
    Object.assign(this, { cells, rows, columns, rowName, columnName, marks, ticks: ticks || spread })
    this.row = Math.min(this.row, rows - 1)
    this.column = Math.min(this.column, columns - 1)
    this.draw()
  }

  draw() {
    if (!this.cells) return
    const ratio = window.devicePixelRatio || 1
    const height = Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, this.rows * ROW_HEIGHT)), width = this.field.clientWidth
    paint(this.canvas, this.cells, this.rows, this.columns, this.colours, Math.round(width * ratio), Math.round(height * ratio))
    this.canvas.style.width = width + 'px'
    this.canvas.style.height = height + 'px'
    this.canvas.dataset.rows = this.rows
    this.canvas.dataset.columns = this.columns
    this.drawLabels(height, ratio)
    this.drawAxis(width, ratio)
    this.cursor.style.display = 'none'
  }

  text(canvas, width, height, ratio) {
    canvas.width = Math.round(width * ratio)
    canvas.height = Math.round(height * ratio)
    canvas.style.width = width + 'px'
    canvas.style.height = height + 'px'
    const context = canvas.getContext('2d'), style = getComputedStyle(document.body)
    context.scale(ratio, ratio)
    context.font = '11px system-ui, sans-serif'
    context.fillStyle = style.color
    return context
  }

  drawLabels(height, ratio) {
    const width = this.labels.parentElement.clientWidth - this.field.offsetWidth - 6
    const context = this.text(this.labels, Math.max(width, 1), height, ratio)
    context.textAlign = 'right'
    context.textBaseline = 'middle'
    const every = Math.ceil(TEXT_HEIGHT * this.rows / height)
    for (let row = every >> 1; row < this.rows; row += every) {
      context.fillText(shortened(this.rowName(row), Math.floor(width / 6)), width - 2, (row + 0.5) * height / this.rows, width - 4)
    }
  }

  drawAxis(width, ratio) {
    const context = this.text(this.axis, width, this.marks ? 30 : 16, ratio), count = Math.max(2, Math.floor(width / 110))
    for (const column of this.ticks(count)) {
      context.fillText(shortened(this.columnName(column), 16), (column + 0.5) * width / this.columns - 4, 11, width / count - 6)
    }
    const style = getComputedStyle(document.documentElement)
    for (const { at, what } of this.marks || []) {
      context.fillStyle = style.getPropertyValue(MARKS[what].colour)
      context.font = '12px system-ui, sans-serif'
      context.fillText(MARKS[what].sign, (at + 0.5) * width / this.columns - 4, 27)
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect()
    const place = (value, size, count) => Math.max(0, Math.min(count - 1, Math.floor(value / size * count)))
    return [place(event.clientY - box.top, box.height, this.rows), place(event.clientX - box.left, box.width, this.columns)]
  }

  move(row, column) {
    this.row = Math.max(0, Math.min(this.rows - 1, row))
    this.column = Math.max(0, Math.min(this.columns - 1, column))
    const width = this.canvas.clientWidth / this.columns, height = this.canvas.clientHeight / this.rows
    Object.assign(this.cursor.style, {
      display: 'block', left: this.column * width + 'px', top: this.row * height + 'px',
      width: Math.max(width, 3) + 'px', height: Math.max(height, 3) + 'px',
    })
    this.shown(this.row, this.column, this.cells[this.row * this.columns + this.column])
  }

  key(event) {
    const page = { row: Math.max(1, this.rows >> 3), column: Math.max(1, this.columns >> 3) }
    const moves = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-page.row, 0], PageDown: [page.row, 0],
      Home: [0, -this.columns], End: [0, this.columns],
    }
    if (event.key in moves) {
      this.move(this.row + moves[event.key][0], this.column + moves[event.key][1])
    } else if (event.key === 'Enter' || event.key === ' ') {
      this.chosen(this.row, this.column)
    } else return
    event.preventDefault()
  }
}

// What is marked below the steps.
const MARKS = {
  clipped: { sign: '✂', colour: '--quiet', says: 'gradients were clipped' },
  skipped: { sign: '✕', colour: '--bad', says: 'the optimizer skipped the step' },
  restarted: { sign: '↻', colour: '--link', says: 'a restart continued here' },
  reconfigured: { sign: '⚙', colour: '--link', says: 'the configuration changed' },
}
